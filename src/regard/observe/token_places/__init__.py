"""Places of tokens: patches of images, tiles and windows, times in sound, and the pixels of a diffusion model."""
