"""Wrong layers, each with one mistake that people make, and the kinds of finding that name it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from examination import wrong_calls as calls
from examination import wrong_constants as constants
from examination import wrong_designs as designs
from examination import wrong_heads as heads
from examination import wrong_kernels as kernels
from examination import wrong_lengths as lengths
from examination import wrong_masks as masks
from examination import wrong_order as order
from examination import wrong_positions as positions
from examination import wrong_softmax as softmax
from examination import wrong_sources as sources
from examination import wrong_training as training
from examination import wrong_weights as weights
from regard import Causal, Documents, Everything, Given, Padding, Window
from regard.mechanism import Mask


@dataclass(frozen=True, eq=False)
class Wrong:
    """How a layer is made, what is expected of it, and the kinds that name its mistake: one of them stands first."""

    make: Callable[..., Any]
    kinds: tuple[str, ...]
    mistake: str
    expects: Mask = Causal()  # noqa: RUF009
    sample: tuple[int, ...] | tuple[tuple[int, ...], ...] | None = None
    offset: int = 0

    @property
    def name(self) -> str:
        return self.make.__name__

    def subject(self) -> Any:
        """The layer, or the function itself."""
        torch.manual_seed(7)
        return self.make() if isinstance(self.make, type) else self.make

    def settings(self) -> dict[str, Any]:
        """The arguments of examine."""
        drawn = torch.Generator().manual_seed(11)
        sample: Tensor | tuple[Tensor, ...] | None = None
        if self.sample is not None and isinstance(self.sample[0], tuple):
            sample = tuple(torch.randn(one, generator=drawn) for one in self.sample)
        elif self.sample is not None:
            sample = torch.randn(self.sample, generator=drawn)
        elif self.offset:
            sample = tuple(torch.randn(2, 3, t, 8, generator=drawn) for t in (6 - self.offset, 6, 6))
        return {"expects": self.expects, "sample": sample, "offset": self.offset}


BATCH = (2, masks.T, masks.C)
REAL = torch.arange(masks.T) < torch.tensor(masks.LENGTHS)[:, None]
BETWEEN_REAL = Given((REAL[:, :, None] & REAL[:, None, :]).unsqueeze(1))
PADDED = {"expects": Padding(masks.LENGTHS), "sample": BATCH}
WINDOW = Causal() & Window(2)
PACKED = Causal() & Documents([0, 0, 0, 1, 1, 1])

MASKS = [
    Wrong(masks.LecturesTril, ("future leak",), "zeros where -inf belongs, as the lectures print"),
    Wrong(masks.FillNotKept, ("future leak",), "masked_fill whose result is not kept"),
    Wrong(masks.TinyFill, ("future leak",), "filled with -1e-9, not -1e9"),
    Wrong(masks.AfterSoftmax, ("not normalised", "future leak"), "the mask after the softmax"),
    Wrong(masks.OnesAdded, ("future leak",), "a table of 0 and 1 added to the scores"),
    Wrong(masks.OwnTokenHidden, ("wrong mask", "blind row"), "triu(0): the own token hidden, the first row NaN"),
    Wrong(masks.OwnTokenHiddenFinite, ("wrong mask",), "triu(0): the own token hidden"),
    Wrong(masks.OneTooMany, ("future leak", "wrong mask"), "triu(2): one token too many"),
    Wrong(masks.PositiveInfinity, ("blind row",), "+inf where -inf belongs"),
    Wrong(masks.SoftcapAfterMask, ("future leak",), "the softcap after the mask"),
    Wrong(masks.Inverted, ("inverted mask",), "True means hidden, to a kernel where it means seen"),
    Wrong(masks.MaskForgotten, ("future leak",), "no mask where none is passed"),
    Wrong(masks.CausalEncoder, ("wrong mask",), "an encoder left causal", Everything()),
    Wrong(masks.WindowTooLong, ("wrong mask",), "a window of one token too many", WINDOW),
    Wrong(masks.WindowBothWays, ("future leak", "wrong mask"), "a window that looks ahead", WINDOW),
    Wrong(masks.DocumentsForgotten, ("wrong mask",), "packed documents that see one another", PACKED, BATCH),
    Wrong(masks.PaddingInverted, ("inverted mask", "padding leak"), "only the padding is seen", **PADDED),
    Wrong(masks.PaddingOfQueries, ("padding leak", "wrong mask", "inverted mask"), "padded queries hidden, not keys", **PADDED),
    Wrong(masks.PaddingForgotten, ("padding leak",), "no padding mask", **PADDED),
    Wrong(masks.PaddingOfOtherSequences, ("padding leak", "wrong mask"), "masks and heads in different orders", **PADDED),
    Wrong(masks.BlindRows, ("blind row",), "padded queries see nothing: NaN", BETWEEN_REAL, BATCH),
    Wrong(masks.UniformRows, ("blind row",), "padded queries see everything alike", BETWEEN_REAL, BATCH),
    Wrong(masks.decoding, ("wrong mask",), "is_causal counts from the first key while decoding", offset=4),
    Wrong(masks.CacheAtTheEnd, ("wrong cache",), "is_causal hides the cache while decoding"),
    Wrong(masks.SummaryOfBlock, ("future leak",), "the mean of all tokens taken from each"),
    Wrong(masks.NormOverTokens, ("future leak",), "a LayerNorm over the sequence"),
]
SOFTMAX = [
    Wrong(softmax.Unscaled, ("wrong scale",), "no scale"),
    Wrong(softmax.ScaledByModel, ("wrong scale",), "√ of the model's width, not the head's"),
    Wrong(softmax.StackedScaledByModel, ("wrong scale",), "the same in heads that are modules of a list"),
    Wrong(softmax.ScaledByWidth, ("wrong scale",), "divided by d"),
    Wrong(softmax.ScaleTurned, ("wrong scale",), "divided by 1/√d"),
    Wrong(softmax.ScaleHardcoded, ("wrong scale",), "the √d of another width"),
    Wrong(softmax.ScaledTwice, ("wrong scale",), "scaled by hand and by the kernel"),
    Wrong(softmax.HeadOfLecture, ("wrong scale",), "√ of the input's width"),
    Wrong(softmax.scaled_by_tokens, ("wrong scale",), "√ of the number of tokens"),
    Wrong(softmax.OverQueries, ("wrong axis",), "softmax over the queries", Everything()),
    Wrong(softmax.OverHeads, ("wrong axis",), "softmax over the heads"),
    Wrong(softmax.OverBatch, ("wrong axis",), "softmax over the batch", Everything()),
    Wrong(softmax.OverHeadsAndKeys, ("wrong axis", "not normalised"), "softmax over heads and keys", Everything()),
    Wrong(softmax.NoSoftmax, ("not normalised",), "no softmax"),
    Wrong(softmax.SoftmaxTwice, ("not normalised", "future leak"), "softmax twice"),
    Wrong(softmax.ExpUndivided, ("not normalised",), "exp that is not divided by its sum"),
    Wrong(softmax.DividedByScores, ("not normalised",), "divided by the sum, without exp"),
    Wrong(softmax.DividedByAbsoluteScores, ("not normalised",), "divided by the sum of absolute scores, without exp"),
    Wrong(softmax.DividedByLength, ("not normalised",), "divided by the length of the row, without exp"),
    Wrong(softmax.keys_filled_up, ("not normalised",), "keys of zeros that fill up a block", Everything()),
    Wrong(softmax.ExpOverflows, ("overflow",), "exp without the maximum taken away"),
    Wrong(softmax.exp_overflows, ("overflow",), "the same as a function"),
    Wrong(softmax.MaskTooSmall, ("overflow", "future leak"), "-1e4 for -inf"),
    Wrong(softmax.HalfInside, ("wrong precision",), "scores rounded to bfloat16"),
    Wrong(softmax.HalfSums, ("wrong precision",), "sums kept in bfloat16"),
]
HEADS = [
    Wrong(heads.ViewedIn, ("mixed heads",), "view without transpose on the way in"),
    Wrong(heads.ViewedOut, ("mixed heads",), "view without transpose on the way out"),
    Wrong(heads.ViewedOutBesideResidual, ("mixed heads", "future leak"), "the same in a block with a norm and a residual"),
    Wrong(heads.ViewedAcrossBatch, ("mixed heads", "batch leak"), "heads first, viewed as if the batch were"),
    Wrong(heads.HeadsBeforeBatch, ("mixed heads", "batch leak"), "(b h) viewed as (h, b)"),
    Wrong(heads.Tiled, ("mixed heads",), "repeat where repeat_interleave belongs"),
    Wrong(heads.FirstGroupOnly, ("mixed heads", "not trainable"), "every head reads the first one's keys"),
    Wrong(heads.HeadsAsTokens, ("mixed heads", "wrong mask"), "heads attend to heads, tokens to none", Everything()),
    Wrong(heads.BatchLast, ("batch leak",), "batch_first forgotten", Everything(), (2, 6, heads.C)),
    Wrong(heads.BatchViewed, ("batch leak",), "reshape where transpose belongs", Everything(), (2, 6, heads.C)),
    Wrong(heads.Exchanged, ("wrong roles",), "query and key exchanged"),
    Wrong(heads.KeysAsValues, ("wrong roles", "not trainable"), "weights times keys"),
    Wrong(heads.ValueOfKeys, ("wrong roles", "not trainable"), "the key's projection for the value"),
    Wrong(heads.QueryUnprojected, ("wrong roles", "not trainable"), "a query that is not projected"),
    Wrong(heads.WeightsTurned, ("wrong roles", "wrong axis"), "weights transposed", Everything()),
]
TRAINING = [
    Wrong(training.DropsAlways, ("dropout in evaluation",), "F.dropout without training="),
    Wrong(training.KernelDropsAlways, ("dropout in evaluation",), "dropout_p at evaluation"),
    Wrong(training.NotRescaled, ("dropout not rescaled",), "zeros without division by 1 - p"),
    Wrong(training.RescaledByDropped, ("dropout not rescaled",), "divided by p"),
    Wrong(training.RescaledInEvaluation, ("dropout not rescaled", "not normalised"), "multiplied by p at evaluation"),
    Wrong(training.ScoresDropped, ("dropout not rescaled",), "dropout of the scores"),
    Wrong(training.Detached, ("not trainable",), "weights detached"),
    Wrong(training.WithoutGradient, ("not trainable",), "no_grad around the attention"),
    Wrong(training.WeightData, ("not trainable",), ".data of a weight"),
    Wrong(training.HeadsInAList, ("not trainable",), "heads in a plain list"),
    Wrong(training.GradientOfNothing, ("not trainable",), "NaN set to 0 after the softmax", BETWEEN_REAL, BATCH),
    Wrong(training.OutputUnused, ("not trainable",), "a projection that is never called"),
]
KERNELS = [
    Wrong(kernels.output_not_rescaled, ("not normalised",), "a running output that keeps the old maximum"),
    Wrong(kernels.OutputNotRescaled, ("wrong blocks",), "the same in a layer"),
    Wrong(kernels.TurnedNotRescaled, ("not normalised",), "the same with positions"),
    Wrong(kernels.diagonal_blocks_unmasked, ("future leak",), "no mask in blocks of 64 on the diagonal but the first"),
    Wrong(kernels.last_block_dropped, ("wrong mask",), "the last block of keys dropped where it is shorter"),
    Wrong(kernels.LastBlockDropped, ("wrong mask",), "the same in a layer with positions"),
    Wrong(kernels.EdgeOfBlocks, ("future leak",), "the last query of a block sees the next one"),
    Wrong(kernels.MaskInAnAttribute, ("future leak",), "a mask of 32 tokens, nothing hidden from those beyond"),
    Wrong(kernels.ScaleOfManyTokens, ("wrong blocks",), "another scale where there are many tokens"),
]
POSITIONS = [
    Wrong(positions.RotaryByHead, ("wrong positions",), "rotary angles along the heads"),
    Wrong(positions.RotaryByBatch, ("wrong positions",), "rotary angles along the batch"),
    Wrong(positions.SinesOfBatch, ("wrong positions",), "sinusoidal positions of (t, b, c) added to (b, t, c)"),
    Wrong(positions.LearnedByBatch, ("wrong positions",), "learned positions along the batch"),
    Wrong(positions.RotaryOfQueries, ("wrong positions",), "queries turned, keys not"),
    Wrong(positions.RotaryOfKeys, ("wrong positions",), "keys turned, queries not"),
    Wrong(positions.PositionsAllZero, ("wrong positions",), "position 0 for every token"),
    Wrong(positions.AlibiOfQueries, ("wrong positions",), "a penalty by the query's place alone"),
]
CALLS = [
    Wrong(calls.RotaryStylesMixed, ("wrong positions",), "queries turned in halves, keys in neighboring pairs"),
    Wrong(calls.RotaryWithoutMinus, ("wrong positions",), "rotate_half without its minus"),
    Wrong(calls.RotaryCosAndSinExchanged, ("wrong positions",), "cos and sin exchanged"),
    Wrong(calls.RotaryOpposite, ("wrong positions",), "keys turned the other way round"),
    Wrong(calls.RotaryOfQueriesInKernel, ("wrong positions",), "queries turned, keys not, in a kernel"),
    Wrong(calls.RotaryWithOtherBase, ("wrong positions",), "another base for keys"),
    Wrong(calls.RotaryKeysLater, ("wrong positions",), "keys start at position 1"),
    Wrong(calls.RotaryScaledTwice, ("wrong scale",), "scaled by hand and by the kernel, beside rotary positions"),
    Wrong(calls.RotaryUnscaled, ("wrong scale",), "no scale, beside rotary positions"),
    Wrong(calls.RotaryScaledByModel, ("wrong scale",), "√ of the model's width, beside rotary positions"),
    Wrong(calls.RotaryMaskInverted, ("inverted mask",), "True means hidden, to a kernel where it means seen, beside rotary"),
    Wrong(calls.NormedScaledByInput, ("wrong scale",), "√ of the input's width, behind a norm"),
    Wrong(calls.RotaryTiled, ("mixed heads",), "repeat where repeat_interleave belongs, beside rotary positions"),
    Wrong(calls.RotaryViewed, ("mixed heads",), "view without transpose, beside rotary positions"),
    Wrong(calls.RotaryExchanged, ("wrong roles",), "query and key exchanged, beside rotary positions"),
    Wrong(calls.AlibiSign, ("wrong positions",), "ALiBi that favors far keys"),
    Wrong(calls.TemperatureInEvaluation, ("wrong scale",), "a temperature in evaluation alone"),
    Wrong(calls.DeadAdapter, ("not trainable",), "an adapter whose two matrices are zero"),
    Wrong(calls.ChosenAmongAll, ("future leak",), "a top-k over the tokens of a sequence"),
    Wrong(calls.ConvolvedBothWays, ("future leak",), "a convolution padded on both sides"),
    Wrong(calls.NormOfGroups, ("future leak",), "a GroupNorm over the tokens"),
    Wrong(calls.NormOfBatch, ("future leak", "batch leak"), "a batch norm over the tokens"),
    Wrong(calls.ShiftedAround, ("future leak",), "a roll that brings the last token to the front"),
    Wrong(calls.HiddenByZeros, ("future leak",), "no mask, behind a projection of zeros"),
]
TWO = {"expects": Everything(), "sample": ((2, 6, 24), (2, 7, 24))}
EQUAL = {"expects": Everything(), "sample": ((2, 6, 24), (2, 6, 24))}
SOURCES = [
    Wrong(sources.CrossOfItself, ("wrong roles",), "cross attention whose keys and values come from its own sequence", **TWO),
    Wrong(sources.CrossKeysOfItself, ("wrong roles",), "keys of its own sequence, values of the other", **EQUAL),
    Wrong(sources.CrossValuesOfItself, ("wrong roles",), "values of its own sequence, keys of the other", **EQUAL),
    Wrong(sources.CrossTurned, ("wrong roles",), "queries of the other sequence, keys and values of its own", **EQUAL),
    Wrong(
        sources.CrossIgnored,
        ("wrong roles",),
        "a decoder block that never reads its memory",
        Causal(),
        ((2, 6, 24), (2, 7, 24)),
    ),
    Wrong(sources.KeyOfQuery, ("wrong roles",), "forward(query, key, value) with keys of the query", Everything()),
    Wrong(sources.ValueOfQuery, ("wrong roles",), "forward(query, key, value) with values of the query", Everything()),
    Wrong(
        sources.KeyAndValueExchanged, ("wrong roles",), "forward(query, key, value) with key and value exchanged", Everything()
    ),
    Wrong(sources.CacheKept, ("wrong cache",), "a cache that no call empties"),
    Wrong(sources.KeysOfTheFirstSequence, ("wrong cache",), "keys and values of the first sequence for all later ones"),
    Wrong(sources.LastKeysKept, ("wrong cache",), "the last keys of the call before"),
    Wrong(sources.BiasAfterSoftmax, ("not normalised",), "a bias by distance added to the weights"),
    Wrong(
        sources.LearnedBiasAfterSoftmax, ("not normalised",), "a table of relative positions added to the weights", Everything()
    ),
    Wrong(
        sources.MaskAfterSoftmaxBesideRotary,
        ("not normalised", "future leak"),
        "the mask after the softmax, beside rotary positions",
    ),
    Wrong(sources.OverQueriesBesideRotary, ("wrong axis",), "softmax over the queries, beside rotary positions", Everything()),
    Wrong(sources.OverHeadsBesideRotary, ("wrong axis",), "softmax over the heads, beside rotary positions", Everything()),
    Wrong(sources.SoftmaxTwiceBesideRotary, ("not normalised",), "softmax twice, beside rotary positions"),
    Wrong(sources.ScaledAfterSoftmaxBesideRotary, ("wrong scale",), "the weights divided by √d, beside rotary positions"),
    Wrong(sources.PaddingZeroedAfterSoftmax, ("not normalised", "padding leak"), "padding hidden after the softmax", **PADDED),
    Wrong(sources.FilledUpToBlocks, ("not normalised",), "keys of zeros that fill up a block, in a layer", Everything()),
    Wrong(sources.PaddedQueriesRotatedLate, ("wrong positions",), "positions of keys that count from the end", Everything()),
]
DESIGNS = [
    Wrong(designs.NormedAcrossHeads, ("wrong axis",), "queries and keys normalized over the heads"),
    Wrong(designs.NormedOverAllHeads, ("wrong axis",), "a norm of one head's width over all heads"),
    Wrong(designs.NormsOfTwoKinds, ("wrong axis",), "queries normalized over each head, keys over all"),
    Wrong(designs.NormedAcrossTokens, ("wrong axis",), "queries and keys normalized over the tokens"),
    Wrong(designs.DifferentialPlus, ("not normalised",), "differential attention that adds"),
    Wrong(designs.DifferentialPlusOfKernels, ("not normalised",), "the same with two calls of a kernel"),
    Wrong(designs.SoftcapOfRawScores, ("wrong softcap",), "the softcap before the scale"),
    Wrong(designs.SoftcapForgotten, ("wrong softcap",), "a softcap that is stated and not applied"),
    Wrong(designs.SoftcapOfAnotherNumber, ("wrong softcap",), "another softcap than the one stated"),
    Wrong(designs.SinksTurned, ("wrong sinks",), "sinks whose sign is turned"),
    Wrong(designs.SinksLeftOut, ("wrong sinks",), "sinks that are cut off before the softmax"),
    Wrong(designs.TableViewed, ("mixed heads",), "a table's rows viewed as (heads, q, k)", Everything(), (2, 6, designs.C)),
    Wrong(
        designs.SinksAsKeys,
        ("wrong sinks", "future leak", "wrong mask", "not normalised"),
        "the sink first, and the last key left out",
    ),
    Wrong(designs.LatentHeadsMixed, ("mixed heads",), "absorbed products of latent attention with heads mixed"),
    Wrong(designs.LatentKeysAndValuesExchanged, ("wrong roles",), "the values' part absorbed in queries of latent attention"),
    Wrong(designs.LatentValuesOfTheNextHead, ("mixed heads",), "absorbed values of another head"),
    Wrong(designs.LatentValuesTransposed, ("wrong roles",), "absorbed values transposed"),
    Wrong(designs.LatentValuesMixed, ("mixed heads",), "absorbed values with heads mixed"),
    Wrong(designs.LatentHeadsReversed, ("mixed heads",), "contexts of latent attention joined in the reverse order"),
    Wrong(designs.LatentHeadsViewed, ("mixed heads",), "contexts of latent attention joined by a view"),
    Wrong(designs.LatentFoldedInColumns, ("mixed heads",), "values folded into the output's weights, with heads mixed"),
    Wrong(designs.LatentFoldedByOtherHeads, ("mixed heads",), "values folded into the output's weights of another head"),
    Wrong(designs.LatentFoldedIntoKeys, ("wrong roles",), "the keys' part folded into the output's weights"),
    Wrong(designs.LatentScaledByWidth, ("wrong scale",), "the scale of the latent's width"),
    Wrong(designs.LatentScaledWithoutRope, ("wrong scale",), "the scale of the columns without positions"),
]
LENGTHS = [
    Wrong(lengths.ScaledByTokens, ("wrong scale",), "the scale of the number of tokens"),
    Wrong(lengths.PositionsInBfloat16, ("wrong positions",), "positions in bfloat16, which repeat beyond 256"),
    Wrong(lengths.PositionsRestart, ("wrong positions",), "positions that start again after four tokens"),
    Wrong(lengths.PositionsSaturate, ("wrong positions",), "a table of 32 positions, the last of which is repeated"),
    Wrong(lengths.ChunksApart, ("wrong mask",), "queries that see no earlier chunk of 32 tokens"),
    Wrong(lengths.ValuesTiled, ("mixed heads",), "grouped values in another order than grouped keys"),
    Wrong(lengths.ValuesRotated, ("wrong positions",), "values that are rotated too"),
    Wrong(lengths.ValuesOfTheNextHead, ("mixed heads",), "values of another head"),
    Wrong(lengths.LastHeadTwice, ("mixed heads",), "the context of one head twice"),
    Wrong(lengths.WeightsOfTheFirstHead, ("mixed heads",), "the weights of one head for all"),
    Wrong(lengths.HalfOfTheHeadsRotated, ("wrong positions",), "rotary positions for two heads of queries, and all of keys"),
    Wrong(lengths.ContextViewed, ("mixed heads",), "heads joined by a view beside rotary positions"),
]
CONSTANTS = [
    Wrong(constants.RotaryOfOneFrequency, ("wrong positions",), "one frequency for all pairs of columns"),
    Wrong(constants.RotaryRising, ("wrong positions",), "frequencies without the minus in their exponents"),
    Wrong(constants.ValuesScaled, ("wrong scale",), "values divided by √d, beside rotary positions"),
    Wrong(constants.ContextTimesWidth, ("wrong scale",), "the context times √d, beside rotary positions"),
    Wrong(constants.AlibiReversed, ("wrong positions",), "ALiBi's slopes in reverse order"),
    Wrong(constants.AlibiOneSided, ("wrong positions",), "ALiBi of an encoder without the absolute value", Everything()),
    Wrong(constants.ClippedTooNear, ("wrong positions",), "distances clipped nearer than their table", Everything()),
    Wrong(constants.ClippedOnOneSide, ("wrong positions",), "later keys that all have one row", Everything()),
    Wrong(constants.BucketsOfBothSides, ("wrong positions",), "T5's bidirectional buckets in a causal layer"),
    Wrong(constants.BucketsOfOneSide, ("wrong positions",), "T5's causal buckets in an encoder", Everything()),
    Wrong(constants.SquaredScores, ("not normalised",), "squares of scores divided by their sum, without exp"),
    Wrong(constants.AbsoluteScores, ("not normalised",), "absolute scores divided by their sum, without exp"),
    Wrong(constants.SoftmaxByLength, ("not normalised",), "a softmax divided by its length"),
    Wrong(constants.ContextDivided, ("not normalised",), "contexts divided by the number of keys, beside rotary positions"),
    Wrong(constants.AlibiBeforeScale, ("wrong positions",), "ALiBi added before the division by √d"),
]
ORDER = [
    Wrong(order.NormedAfterRotary, ("wrong positions",), "a LayerNorm of rotated queries and keys"),
    Wrong(order.ValuesRolled, ("wrong positions",), "values rolled by a token, in an encoder", Everything()),
    Wrong(order.ValuesOfTheTokenBefore, ("wrong positions",), "values of the token before"),
    Wrong(order.KeysOfTheNextToken, ("wrong positions",), "keys of the next token, in an encoder", Everything()),
    Wrong(order.RotaryOfOnePosition, ("wrong positions",), "the angles of one position for all tokens"),
    Wrong(order.LatentKeysNotRotated, ("wrong positions",), "keys of latent attention without their rotation"),
    Wrong(order.ValuesOfTheKeys, ("wrong roles",), "values of the keys' projection, beside rotary positions"),
    Wrong(order.JointValuesOfTheKeys, ("wrong roles",), "keys and values of one third of a joint projection"),
    Wrong(order.OutputBiasTwice, ("wrong output",), "the bias of the output added twice"),
    Wrong(order.OutputTwice, ("wrong output",), "the output projected twice"),
    Wrong(order.OutputTransposed, ("wrong output",), "the weight of the output without its transpose"),
    Wrong(order.scores_without_negatives, ("wrong scores",), "a relu before the softmax, in a function"),
    Wrong(order.ScoresWithoutNegatives, ("wrong scores",), "a relu before the softmax, beside rotary positions"),
    Wrong(order.ScoresClamped, ("wrong scores",), "scores clamped to -0.5 to 0.5, beside rotary positions"),
]
WEIGHTS = [
    Wrong(weights.NoSoftmax, ("not normalised",), "no softmax, beside rotary positions"),
    Wrong(weights.SigmoidWeights, ("not normalised",), "a sigmoid in place of the softmax"),
    Wrong(weights.LogarithmsOfWeights, ("not normalised",), "log_softmax in place of softmax"),
    Wrong(weights.ScoresSquared, ("wrong scores",), "scores squared before the softmax"),
    Wrong(weights.ScoresRoundedDown, ("wrong scores",), "scores divided by //"),
    Wrong(weights.HiddenAfterSoftmax, ("not normalised",), "-1e9 after the softmax"),
    Wrong(weights.WeightsTransposed, ("wrong roles",), "weights transposed before the values"),
    Wrong(weights.SinksCutAtTheWrongEnd, ("wrong sinks",), "the first key left out of a softmax whose last is a sink"),
    Wrong(weights.SinksRenormalized, ("wrong sinks",), "weights divided by their sum without the sinks"),
    Wrong(weights.SinksAfterSoftmax, ("wrong sinks",), "sinks in a factor after the softmax"),
    Wrong(weights.ValueBiasTwice, ("wrong output",), "the bias of the values added twice"),
    Wrong(weights.ValuesNormedAsKeys, ("wrong roles",), "values normalized by the norm of the keys"),
    Wrong(weights.GroupedKeysViewed, ("mixed heads",), "grouped keys and values viewed without a transpose"),
    Wrong(weights.values_rolled, ("wrong positions",), "values rolled by a token, in a causal function"),
]
WRONG = [
    *(*MASKS, *SOFTMAX, *HEADS, *TRAINING, *KERNELS, *POSITIONS, *CALLS, *SOURCES, *DESIGNS, *LENGTHS, *CONSTANTS, *ORDER),
    *WEIGHTS,
]
