"""Attribution: what heads, paths and tokens do to a number that a model computes."""
