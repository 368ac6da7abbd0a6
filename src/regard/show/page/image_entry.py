"""A recording with the images that its model read, as the page stores it."""

from collections.abc import Sequence
from typing import Any

from regard.observe import Recording
from regard.observe.attribution import Attribution
from regard.observe.classification.head_scores import HeadOptions, UserScore
from regard.show.image_input import load_images
from regard.show.page.image_places import encode_image
from regard.show.page.image_pulls import UNNAMED, check_pull
from regard.show.page.recording_entry import RecordingEntry
from regard.show.page.recording_id import identify_recording
from regard.show.patch_weights import require_patches


def make_entry(
    recording: Recording,
    scores: Sequence[UserScore] = (),
    image: Any = None,
    attribution: Attribution | None = None,
    number: str = UNNAMED,
) -> RecordingEntry:
    """Make the entry of a recording with its images, and the pull on a number. Raises ConfigError as regard.page does."""
    HeadOptions(scores=scores).check()
    images = [encode_image(pixels) for pixels in load_images(image)]
    if images:
        require_patches(recording)
    pull = check_pull(recording, attribution, number, bool(images))
    return RecordingEntry(identify_recording(recording), recording, scores=scores, images=images, pull=pull)
