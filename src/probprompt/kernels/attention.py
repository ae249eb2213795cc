"""Attention of a frozen block over short sequences, on packed projections.

Keys are ordered: own tokens, then prefix. A ViT's sequence is a few blocks and a remainder (197 = 3 * 64 + 5, and a
prefix of 4). The remainder, prefix included, is one small block, so that little work is wasted and whole blocks need no
masks. Exponentials and stored logarithms are to base 2, which the GPU computes natively.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from probprompt.errors import UserError

WIDEST = 128
"""Maximum head width."""
LEAST = 16
"""Minimum rows in a product of blocks."""
LOG2E = tl.constexpr(1.4426950408889634)
Prefixed = tuple[Tensor, Tensor]
"""Keys and values before the sequence's own, (B, P, W) each."""


class Tuning(NamedTuple):
    """Tiling of a kernel: rows of queries and of keys per block, warps of a program, stages of its loops."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None  # maximum per thread: fewer let more programs share a processor


FORWARD = {64: Tuning(128, 32, 4, 3), WIDEST: Tuning(128, 64, 8, 2)}
"""By maximum head width; a program holds a block of queries and loops over blocks of keys."""
QUERIES_BACKWARD = {64: Tuning(64, 64, 4, 2), WIDEST: Tuning(64, 64, 4, 2)}
"""The same for the gradient of the queries."""
KEYS_BACKWARD = {64: Tuning(64, 64, 4, 2, 168), WIDEST: Tuning(64, 64, 8, 2)}
"""For the gradients of keys and values: a program holds a block of keys and loops over blocks of queries."""
PREFIX_BACKWARD = {64: Tuning(64, 16, 2, 2), WIDEST: Tuning(64, 64, 4, 2)}
"""For the gradients of only the prefix."""
SINGLE = Tuning(32, 32, 4, 1)
"""For float32, without tensor cores."""
SHORT = 64
"""Sequences up to this length are one block, for which four warps are enough."""


class Plan(NamedTuple):
    """Compile-time constants of a kernel."""

    heads: int
    head: int  # width of a head, and its next power of two
    padded: int
    length: int  # own tokens, and tokens of the prefix
    prefix: int
    key_image: int  # strides of the prefix
    key_row: int
    value_image: int
    value_row: int
    queries: int  # rows of a whole block, whole blocks, rows of the remainder
    query_blocks: int
    query_tail: int
    keys: int
    key_blocks: int
    key_tail: int
    key_start: int  # start of the remainder
    programs: int  # per head


class Head(NamedTuple):
    """Pointers to the parts of one head of one image."""

    query: tl.tensor
    key: tl.tensor
    value: tl.tensor
    prefix_key: tl.tensor
    prefix_value: tl.tensor
    mixed: tl.tensor
    logsumexp: tl.tensor
    grad: tl.tensor
    delta: tl.tensor


@triton.jit
def _head(qkv, prefix_key, prefix_value, mixed, logsumexp, grad, delta, plan: tl.constexpr):
    """Return block, column, image and pointers; programs of a head are adjacent."""
    width: tl.constexpr = plan.heads * plan.head
    program = tl.program_id(0)
    head = program // plan.programs % plan.heads
    image = (program // (plan.programs * plan.heads)).to(tl.int64)
    column = head * plan.head
    packed = qkv + image * (plan.length * 3 * width) + column
    plain = image * (plan.length * width) + column
    single = (image * plan.heads + head) * plan.length
    where = Head(
        query=packed,
        key=packed + width,
        value=packed + 2 * width,
        prefix_key=prefix_key + image * plan.key_image + column,
        prefix_value=prefix_value + image * plan.value_image + column,
        mixed=mixed + plain,
        logsumexp=logsumexp + single,
        grad=grad + plain,
        delta=delta + single,
    )
    return program % plan.programs, column, image, where


@triton.jit
def _rows(pointer, start, stride: tl.constexpr, plan: tl.constexpr, size: tl.constexpr, whole: tl.constexpr):
    """Load rows of a head (size, padded), zero beyond the sequence and the head's width."""
    row = start + tl.arange(0, size)
    column = tl.arange(0, plan.padded)
    place = pointer + row[:, None] * stride + column[None, :]
    if whole and plan.head == plan.padded:
        return tl.load(place)
    mask = (column < plan.head)[None, :]
    if not whole:
        mask = mask & (row < plan.length)[:, None]
    return tl.load(place, mask=mask, other=0.0)


@triton.jit
def _keys(own, prefix, start, stride: tl.constexpr, plan: tl.constexpr, size: tl.constexpr, whole: tl.constexpr):
    """Load keys or values of a head (size, padded): own ones, then the prefix, then zeros."""
    block = _rows(own, start, 3 * plan.heads * plan.head, plan, size, whole)
    if not whole and plan.prefix > 0:
        row = start - plan.length + tl.arange(0, size)
        column = tl.arange(0, plan.padded)
        mask = ((row >= 0) & (row < plan.prefix))[:, None] & (column < plan.head)[None, :]
        block += tl.load(prefix + row[:, None] * stride + column[None, :], mask=mask, other=0.0).to(block.dtype)
    return block


@triton.jit
def _write(
    pointer,
    values,
    start,
    first: tl.constexpr,
    last: tl.constexpr,
    stride: tl.constexpr,
    plan: tl.constexpr,
    size: tl.constexpr,
):
    """Write the rows of a block (size, padded) from first to last; the pointer is at first."""
    row = start + tl.arange(0, size)
    column = tl.arange(0, plan.padded)
    mask = ((row >= first) & (row < last))[:, None] & (column < plan.head)[None, :]
    place = pointer + (row - first)[:, None] * stride + column[None, :]
    tl.store(place, values.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _logits(query, key, start, plan: tl.constexpr, size: tl.constexpr, whole: tl.constexpr):
    """Return products (queries, size) with a block of keys, minus infinity beyond the keys."""
    logits = tl.dot(query, tl.trans(key), input_precision="ieee")
    if whole:
        return logits
    known = start + tl.arange(0, size) < plan.length + plan.prefix
    return tl.where(known[None, :], logits, float("-inf"))


@triton.jit
def _attend(where: Head, query, start, scale, state, plan: tl.constexpr, size: tl.constexpr, whole: tl.constexpr):
    """Add a block of keys to the maximum logit, sum of weights and weighted sum of values."""
    peak, total, mixed = state
    key = _keys(where.key, where.prefix_key, start, plan.key_row, plan, size, whole)  # (size, padded)
    value = _keys(where.value, where.prefix_value, start, plan.value_row, plan, size, whole)
    logits = _logits(query, key, start, plan, size, whole)  # (queries, size)
    higher = tl.maximum(peak, tl.max(logits, axis=1) * scale)
    weights = tl.exp2(logits * scale - higher[:, None])
    shrink = tl.exp2(peak - higher)
    total = total * shrink + tl.sum(weights, axis=1)
    mixed = tl.dot(weights.to(value.dtype), value, mixed * shrink[:, None], input_precision="ieee")
    return higher, total, mixed


@triton.jit
def _mix(where: Head, start, scale, plan: tl.constexpr, size: tl.constexpr, whole: tl.constexpr):
    """Attend from one block of queries to all keys."""
    padded: tl.constexpr = plan.padded
    query = _rows(where.query, start, 3 * plan.heads * plan.head, plan, size, whole)  # (size, padded)
    peak = tl.full((size,), float("-inf"), tl.float32)
    state = (peak, tl.zeros((size,), tl.float32), tl.zeros((size, padded), tl.float32))
    for begin in range(0, plan.key_start, plan.keys):
        state = _attend(where, query, begin, scale, state, plan, plan.keys, True)
    for begin in range(plan.key_start, plan.length + plan.prefix, plan.key_tail):
        state = _attend(where, query, begin, scale, state, plan, plan.key_tail, False)
    peak, total, mixed = state
    row = start + tl.arange(0, size)
    tl.store(where.logsumexp + row, peak + tl.log2(total), mask=row < plan.length)
    _write(where.mixed, mixed * (1.0 / total)[:, None], start, 0, plan.length, plan.heads * plan.head, plan, size)


@triton.jit
def _forward(qkv, prefix_key, prefix_value, mixed, logsumexp, scale, plan: tl.constexpr):
    block, _, _, where = _head(qkv, prefix_key, prefix_value, mixed, logsumexp, mixed, logsumexp, plan)
    if plan.query_blocks > 0 and block < plan.query_blocks:
        _mix(where, block * plan.queries, scale * LOG2E, plan, plan.queries, True)
    else:
        _mix(where, block * plan.queries, scale * LOG2E, plan, plan.query_tail, False)


@triton.jit
def _query_step(
    where: Head, given, start, scale, gradient, plan: tl.constexpr, size: tl.constexpr, whole: tl.constexpr
):
    """Add the gradient of a block of queries that comes through one block of keys."""
    query, grad, logsumexp, delta = given
    key = _keys(where.key, where.prefix_key, start, plan.key_row, plan, size, whole)  # (size, padded)
    value = _keys(where.value, where.prefix_value, start, plan.value_row, plan, size, whole)
    weights = tl.exp2(_logits(query, key, start, plan, size, whole) * scale - logsumexp[:, None])  # (queries, size)
    slope = tl.dot(grad, tl.trans(value), input_precision="ieee")  # (queries, size)
    inner = (weights * (slope - delta[:, None])).to(key.dtype)
    return tl.dot(inner, key, gradient, input_precision="ieee")


@triton.jit
def _query_gradient(where: Head, result, start, scale, plan: tl.constexpr, size: tl.constexpr, whole: tl.constexpr):
    """Compute the gradient of a block of queries, and store inner products for the keys."""
    width: tl.constexpr = plan.heads * plan.head
    padded: tl.constexpr = plan.padded
    row = start + tl.arange(0, size)
    query = _rows(where.query, start, 3 * width, plan, size, whole)  # (size, padded)
    grad = _rows(where.grad, start, width, plan, size, whole)
    mixed = _rows(where.mixed, start, width, plan, size, whole)
    delta = tl.sum(grad.to(tl.float32) * mixed.to(tl.float32), axis=1)  # (size,)
    tl.store(where.delta + row, delta, mask=row < plan.length)
    given = (query, grad, tl.load(where.logsumexp + row, mask=row < plan.length, other=0.0), delta)
    gradient = tl.zeros((size, padded), tl.float32)
    for begin in range(0, plan.key_start, plan.keys):
        gradient = _query_step(where, given, begin, scale * LOG2E, gradient, plan, plan.keys, True)
    for begin in range(plan.key_start, plan.length + plan.prefix, plan.key_tail):
        gradient = _query_step(where, given, begin, scale * LOG2E, gradient, plan, plan.key_tail, False)
    _write(result, gradient * scale, start, 0, plan.length, 3 * width, plan, size)


@triton.jit
def _queries_backward(qkv, prefix_key, prefix_value, mixed, logsumexp, grad, delta, result, scale, plan: tl.constexpr):
    block, column, image, where = _head(qkv, prefix_key, prefix_value, mixed, logsumexp, grad, delta, plan)
    result += image * (plan.length * 3 * plan.heads * plan.head) + column
    if plan.query_blocks > 0 and block < plan.query_blocks:
        _query_gradient(where, result, block * plan.queries, scale, plan, plan.queries, True)
    else:
        _query_gradient(where, result, block * plan.queries, scale, plan, plan.query_tail, False)


@triton.jit
def _key_step(
    where: Head,
    given,
    start,
    scale,
    gradients,
    own: tl.constexpr,
    plan: tl.constexpr,
    size: tl.constexpr,
    whole: tl.constexpr,
):
    """Add the gradients of a block of keys and values that come through a block of queries."""
    width: tl.constexpr = plan.heads * plan.head
    key, value = given
    row = start + tl.arange(0, size)
    query = _rows(where.query, start, 3 * width, plan, size, whole)  # (size, padded)
    grad = _rows(where.grad, start, width, plan, size, whole)
    logsumexp = tl.load(where.logsumexp + row, mask=row < plan.length, other=0.0)  # (size,)
    if own:
        delta = tl.load(where.delta + row, mask=row < plan.length, other=0.0)
    else:
        mixed = _rows(where.mixed, start, width, plan, size, whole)
        delta = tl.sum(grad.to(tl.float32) * mixed.to(tl.float32), axis=1)
    # Keys are the rows here, so that exponentials enter the next product from registers.
    logits = tl.dot(key, tl.trans(query), input_precision="ieee")  # (keys, size)
    weights = tl.exp2(logits * scale - logsumexp[None, :])
    value_gradient = tl.dot(weights.to(grad.dtype), grad, gradients[1], input_precision="ieee")
    slope = tl.dot(value, tl.trans(grad), input_precision="ieee")
    inner = (weights * (slope - delta[None, :])).to(query.dtype)
    return tl.dot(inner, query, gradients[0], input_precision="ieee"), value_gradient


@triton.jit
def _key_gradient(
    where: Head, results, start, scale, own: tl.constexpr, plan: tl.constexpr, size: tl.constexpr, whole: tl.constexpr
):
    """Compute the gradients of one block of keys and values."""
    width: tl.constexpr = plan.heads * plan.head
    padded: tl.constexpr = plan.padded
    rest: tl.constexpr = plan.query_blocks * plan.queries
    key = _keys(where.key, where.prefix_key, start, plan.key_row, plan, size, whole)  # (size, padded)
    value = _keys(where.value, where.prefix_value, start, plan.value_row, plan, size, whole)
    zeros = tl.zeros((size, padded), tl.float32)
    gradients = (zeros, zeros)
    for begin in range(0, rest, plan.queries):
        gradients = _key_step(where, (key, value), begin, scale * LOG2E, gradients, own, plan, plan.queries, True)
    if rest < plan.length:
        gradients = _key_step(where, (key, value), rest, scale * LOG2E, gradients, own, plan, plan.query_tail, False)
    packed, prefix_key, prefix_value = results
    if own:
        _write(packed + width, gradients[0] * scale, start, 0, plan.length, 3 * width, plan, size)
        _write(packed + 2 * width, gradients[1], start, 0, plan.length, 3 * width, plan, size)
    if not whole and plan.prefix > 0:
        last: tl.constexpr = plan.length + plan.prefix
        _write(prefix_key, gradients[0] * scale, start, plan.length, last, width, plan, size)
        _write(prefix_value, gradients[1], start, plan.length, last, width, plan, size)


@triton.jit
def _keys_backward(
    qkv,
    prefix_key,
    prefix_value,
    mixed,
    logsumexp,
    grad,
    delta,
    result,
    result_key,
    result_value,
    scale,
    own: tl.constexpr,
    plan: tl.constexpr,
):
    block, column, image, where = _head(qkv, prefix_key, prefix_value, mixed, logsumexp, grad, delta, plan)
    place = image * (plan.prefix * plan.heads * plan.head) + column
    packed = result + image * (plan.length * 3 * plan.heads * plan.head) + column
    results = (packed, result_key + place, result_value + place)
    if plan.key_blocks > 0 and block < plan.key_blocks:
        _key_gradient(where, results, block * plan.keys, scale, own, plan, plan.keys, True)
    else:
        start = plan.key_start + (block - plan.key_blocks) * plan.key_tail
        _key_gradient(where, results, start, scale, own, plan, plan.key_tail, False)


def attention(qkv: Tensor, heads: int, scale: float, prefix: Prefixed | None = None) -> tuple[Tensor, Tensor]:
    """Attend over packed queries, keys and values (B, T, 3 W), and a prefix, (B, P, W) each.

    Returns the output (B, T, W) and, for the backward pass, float32 logarithms to base 2 of the sums of exponentials
    (B, heads, T). A prefix may be shared by all images (its first stride 0) and of any dtype.
    """
    _check(qkv, heads, scale)
    images, length, packed = qkv.shape
    mixed = qkv.new_empty(images, length, packed // 3)  # (B, T, W)
    logsumexp = torch.empty(images, heads, length, dtype=torch.float32, device=qkv.device)  # (B, heads, T)
    key, value = (qkv, qkv) if prefix is None else prefix
    tuning = _tuning(FORWARD, qkv, heads)
    plan = _plan(qkv, heads, prefix, tuning)
    _forward[_grid(qkv, plan)](qkv, key, value, mixed, logsumexp, scale, plan=plan, **_options(tuning))
    return mixed, logsumexp


def attention_backward(
    grad: Tensor,
    qkv: Tensor,
    mixed: Tensor,
    logsumexp: Tensor,
    heads: int,
    scale: float,
    prefix: Prefixed | None = None,
    own: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute gradients of :func:`attention` for a gradient (B, T, W) of its output.

    Returns that of the packed queries, keys and values (B, T, 3 W), and of the prefix's keys and values for each image
    (B, P, W), in float32. Without ``own`` it computes only the prefix's, which is much cheaper.
    """
    _check(qkv, heads, scale, grad, mixed, logsumexp)
    key, value = (qkv, qkv) if prefix is None else prefix
    result = torch.empty_like(qkv) if own else None  # (B, T, 3 W)
    delta = torch.empty_like(logsumexp) if own else logsumexp  # (B, heads, T)
    result_key, result_value = (None, None) if prefix is None else (_fresh(key), _fresh(value))  # (B, P, W) each
    given = (qkv, key, value, mixed, logsumexp, grad, delta)
    if result is not None:
        tuning = _tuning(QUERIES_BACKWARD, qkv, heads)
        plan = _plan(qkv, heads, prefix, tuning)
        _queries_backward[_grid(qkv, plan)](*given, result, scale, plan=plan, **_options(tuning))
    if result is not None or prefix is not None:
        tuning = _tuning(KEYS_BACKWARD if own else PREFIX_BACKWARD, qkv, heads)
        plan = _keys_plan(_plan(qkv, heads, prefix, tuning), own)
        unused = qkv if result is None else result
        results = [unused if tensor is None else tensor for tensor in (result, result_key, result_value)]
        _keys_backward[_grid(qkv, plan)](*given, *results, scale, own=own, plan=plan, **_options(tuning))
    return result, result_key, result_value


def _check(qkv: Tensor, heads: int, scale: float, *others: Tensor) -> None:
    if qkv.shape[2] % (3 * heads) or qkv.shape[2] > 3 * heads * WIDEST:
        raise UserError(
            f"The attention kernel cannot split {qkv.shape[2]} columns into queries, keys and values of {heads} heads "
            f"up to width {WIDEST}. Set PROBPROMPT_KERNELS=off."
        )
    if not all(tensor.is_contiguous() for tensor in (qkv, *others)):
        raise UserError("The attention kernel needs contiguous tensors. Call contiguous().")
    if scale <= 0:
        raise UserError(f"The scale of attention must be positive, got {scale}.")


def _fresh(part: Tensor) -> Tensor:
    """Allocate a gradient ``(B, P, W)``."""
    return torch.empty(part.shape, dtype=torch.float32, device=part.device)


def _tuning(table: dict[int, Tuning], qkv: Tensor, heads: int) -> Tuning:
    if qkv.dtype == torch.float32:
        return SINGLE
    tuning = table[min(width for width in table if width >= qkv.shape[2] // (3 * heads))]
    return tuning if qkv.shape[1] > SHORT else tuning._replace(queries=min(tuning.queries, SHORT), warps=4)


def _plan(qkv: Tensor, heads: int, prefix: Prefixed | None, tuning: Tuning) -> Plan:
    """Plan a program per block of queries."""
    length, head = qkv.shape[1], qkv.shape[2] // (3 * heads)
    extra, strides = (0, (0, 0, 0, 0)) if prefix is None else (prefix[0].shape[1], _strides(*prefix))
    query_blocks, key_blocks = length // tuning.queries, length // tuning.keys
    key_start = key_blocks * tuning.keys
    query_tail = _tail(length - query_blocks * tuning.queries, tuning.queries)
    key_tail = _tail(length + extra - key_start, tuning.keys)
    return Plan(
        *(heads, head, max(LEAST, _power(head)), length, extra, *strides),
        *(tuning.queries, query_blocks, query_tail, tuning.keys, key_blocks, key_tail, key_start),
        programs=-(-length // tuning.queries),
    )


def _keys_plan(plan: Plan, own: bool) -> Plan:
    """Plan a program per block of keys: of all keys, or of only the prefix."""
    if not own:
        plan = plan._replace(key_blocks=0, key_start=plan.length, key_tail=_tail(plan.prefix, plan.keys))
    left = plan.length + plan.prefix - plan.key_start
    return plan._replace(programs=plan.key_blocks + -(-left // plan.key_tail))


def _strides(key: Tensor, value: Tensor) -> tuple[int, int, int, int]:
    if key.stride(2) != 1 or value.stride(2) != 1:
        raise UserError("The attention kernel needs prefixes with contiguous columns. Call contiguous().")
    return key.stride(0), key.stride(1), value.stride(0), value.stride(1)


def _tail(left: int, most: int) -> int:
    """Return the rows of the block for the remainder."""
    return max(LEAST, min(most, _power(left)))


def _power(count: int) -> int:
    """Return the next power of two."""
    return 1 << max(0, count - 1).bit_length()


def _grid(qkv: Tensor, plan: Plan) -> tuple[int]:
    return (qkv.shape[0] * plan.heads * plan.programs,)


def _options(tuning: Tuning) -> dict[str, int | None]:
    return {"num_warps": tuning.warps, "num_stages": tuning.stages, "maxnreg": tuning.registers}


LONGEST = 512
"""Maximum length of a sequence: a program holds the keys of a head."""


@triton.jit
def _place(length: tl.constexpr, head: tl.constexpr, rows: tl.constexpr, wide: tl.constexpr):
    """Return rows of the sequence, columns of the head, and their masks."""
    row = tl.arange(0, rows)
    column = tl.arange(0, wide)
    return row, column, row < length, column < head


@triton.jit
def _read(
    query,
    packed,
    mixed,
    weights,
    scale,
    heads: tl.constexpr,
    head: tl.constexpr,
    length: tl.constexpr,
    rows: tl.constexpr,
    wide: tl.constexpr,
):
    image, which = tl.program_id(0).to(tl.int64) // heads, tl.program_id(0) % heads
    row, column, used, known = _place(length, head, rows, wide)
    width: tl.constexpr = heads * head
    at = image * width + which * head + column
    source = packed + (image * length + row[:, None]) * (2 * width) + which * head + column[None, :]
    mask = used[:, None] & known[None, :]
    key = tl.load(source, mask=mask, other=0.0).to(tl.float32)  # (rows, wide)
    value = tl.load(source + width, mask=mask, other=0.0).to(tl.float32)
    asked = tl.load(query + at, mask=known, other=0.0).to(tl.float32)  # (wide,)
    logits = tl.where(used, tl.sum(key * asked[None, :], axis=1) * scale, float("-inf"))  # (rows,)
    share = tl.exp(logits - tl.max(logits, axis=0))
    share = share / tl.sum(share, axis=0)
    tl.store(weights + tl.program_id(0).to(tl.int64) * length + row, share, mask=used)
    answer = tl.sum(value * share[:, None], axis=0)  # (wide,)
    tl.store(mixed + at, answer.to(mixed.dtype.element_ty), mask=known)


@triton.jit
def _read_backward(
    grad,
    query,
    packed,
    weights,
    grad_query,
    grad_packed,
    scale,
    heads: tl.constexpr,
    head: tl.constexpr,
    length: tl.constexpr,
    rows: tl.constexpr,
    wide: tl.constexpr,
):
    image, which = tl.program_id(0).to(tl.int64) // heads, tl.program_id(0) % heads
    row, column, used, known = _place(length, head, rows, wide)
    width: tl.constexpr = heads * head
    at = image * width + which * head + column
    place = (image * length + row[:, None]) * (2 * width) + which * head + column[None, :]
    mask = used[:, None] & known[None, :]
    value = tl.load(packed + width + place, mask=mask, other=0.0).to(tl.float32)  # (rows, wide)
    given = tl.load(grad + at, mask=known, other=0.0).to(tl.float32)  # (wide,)
    share = tl.load(weights + tl.program_id(0).to(tl.int64) * length + row, mask=used, other=0.0)  # (rows,)
    kind = grad_packed.dtype.element_ty
    tl.store(grad_packed + width + place, (share[:, None] * given[None, :]).to(kind), mask=mask)
    slope = tl.sum(value * given[None, :], axis=1)  # (rows,)
    slope = share * (slope - tl.sum(slope * share, axis=0)) * scale
    asked = tl.load(query + at, mask=known, other=0.0).to(tl.float32)
    tl.store(grad_packed + place, (slope[:, None] * asked[None, :]).to(kind), mask=mask)
    key = tl.load(packed + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(grad_query + at, tl.sum(key * slope[:, None], axis=0).to(grad_query.dtype.element_ty), mask=known)


def read(query: Tensor, packed: Tensor, heads: int, scale: float) -> tuple[Tensor, Tensor]:
    """Attend from one query (B, W) per image to packed keys and values (B, T, 2 W).

    Returns the output (B, W), and float32 weights (B, heads, T) for the backward pass.
    """
    mixed = torch.empty_like(query)
    weights = torch.empty(len(query), heads, packed.shape[1], dtype=torch.float32, device=query.device)
    _read[(len(query) * heads,)](query, packed, mixed, weights, scale, **_shape(query, packed, heads))
    return mixed, weights


def read_backward(
    grad: Tensor, query: Tensor, packed: Tensor, weights: Tensor, heads: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the query and of packed keys and values for :func:`read`."""
    grad_query, grad_packed = torch.empty_like(query), torch.empty_like(packed)
    given = (grad.contiguous(), query, packed, weights, grad_query, grad_packed)
    _read_backward[(len(query) * heads,)](*given, scale, **_shape(query, packed, heads))
    return grad_query, grad_packed


def _shape(query: Tensor, packed: Tensor, heads: int) -> dict[str, int]:
    head, length = query.shape[1] // heads, packed.shape[1]
    rows, wide = triton.next_power_of_2(length), triton.next_power_of_2(head)
    sizes = {"heads": heads, "head": head, "length": length, "rows": rows, "wide": wide}
    return {**sizes, "num_warps": 8 if rows > 256 else 4}
