"""Tests of the reader of compiled programs, on programs whose costs are known."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from experiments.bench.compiled.cost import Peaks, cost_of
from experiments.bench.compiled.execution import Loop, executions
from experiments.bench.compiled.hlo import arrays_of, parse

# Bytes of f32[8,128], which a TPU stores as one tile.
TILE = 4096


def program(entry, *, computations="", head=""):
    """Returns a program's text, from the lines of its entry and the computations before it.

    A line that is indented by eight spaces continues the line above.
    """
    text = f"HloModule m{head}\n{computations}\nENTRY %main () -> f32[] {{{entry}}}\n"
    return re.sub(r"\n {8}", " ", text)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("f32[3,5]{1,0}", 60),
        ("f32[]", 4),
        # 3 x 5 in tiles of 8 x 128.
        ("f32[3,5]{1,0:T(8,128)}", 8 * 128 * 4),
        # The fastest axis is the first: 5 rows become 8, 200 columns 256.
        ("f32[200,5]{0,1:T(8,128)}", 8 * 256 * 4),
        # Two rows share each word, which fills up nothing more.
        ("bf16[22,8,512,64]{3,2,1,0:T(8,128)(2,1)}", 22 * 8 * 512 * 128 * 2),
        # S(1) is the vector memory. All others are in HBM.
        ("pred[1000]{0:T(1024)(128)(4,1)S(1)}", 1024),
        # Two numbers of 4 bits are a byte.
        ("s4[16,128]{1,0:T(8,128)}", 1024),
    ],
)
def test_arrays_are_stored_in_whole_tiles(shape, expected):
    [array] = arrays_of(shape)
    assert array.stored_bytes == expected
    assert array.in_hbm == ("S(1)" not in shape)


def test_an_operation_moves_its_operands_and_results_in_hbm():
    text = program("""
    %a = f32[8,128]{1,0:T(8,128)} parameter(0)
    %b = f32[8,128]{1,0:T(8,128)S(1)} parameter(1)
    %c = f32[8,128]{1,0:T(8,128)S(1)} add(%a, %b)
    ROOT %d = f32[8,128]{1,0:T(8,128)} add(%b, %c)
""")
    cost = cost_of(text)
    # S(1) is not HBM, so only %a is read there, and %d written.
    assert cost.hbm_bytes == 2 * TILE
    first_sum, second_sum = cost.operations[2:]
    assert first_sum.traffic.read == TILE
    assert second_sum.traffic.read == 0


def test_asynchronous_copies_and_slices_count_once_at_the_side_in_hbm():
    text = program("""
    %a = bf16[64,410]{1,0:T(8,128)(2,1)} parameter(0)
    %copy-start.1 = (bf16[64,410]{1,0:T(8,128)(2,1)S(1)}, bf16[64,410]{1,0:T(8,128)(2,1)},
        u32[]{:S(2)}) copy-start(%a)
    %copy-done.1 = bf16[64,410]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start.1)
    %slice-start.1 = ((bf16[64,410]{1,0:T(8,128)(2,1)}), bf16[8,410]{1,0:T(8,128)(2,1)S(1)},
        s32[]{:S(2)}) slice-start(%a), slice={[0:8], [0:410]}
    %slice-done.1 = bf16[8,410]{1,0:T(8,128)(2,1)S(1)} slice-done(%slice-start.1)
    ROOT %joined = bf16[72,410]{1,0:T(8,128)(2,1)S(1)} concatenate(%copy-done.1, %slice-done.1)
""")
    # The copied and the sliced rows are read. 410 columns take the place of 512.
    assert cost_of(text).hbm_bytes == (64 + 8) * 512 * 2


def test_a_new_buffer_without_contents_is_free():
    text = program("""
    ROOT %new = f32[8,128]{1,0:T(8,128)} custom-call(), custom_call_target="AllocateBuffer"
""")
    assert cost_of(text).hbm_bytes == 0


SLICING = """
%fused (stack: f32[12,8,128], new: f32[1,8,128], index: s32[]) -> f32[1,8,128] {
  %stack = f32[12,8,128]{2,1,0:T(8,128)} parameter(0)
  %new = f32[1,8,128]{2,1,0:T(8,128)} parameter(1)
  %index = s32[] parameter(2)
  %renamed = f32[12,8,128]{2,1,0:T(8,128)} bitcast(%stack)
  %slice = f32[1,8,128]{2,1,0:T(8,128)} dynamic-slice(%renamed, %index, %index, %index)
  ROOT %result = f32[1,8,128]{2,1,0:T(8,128)} add(%slice, %new)
}
"""
UPDATING = """
%fused (stack: f32[12,8,128], new: f32[1,8,128], index: s32[]) -> f32[12,8,128] {
  %stack = f32[12,8,128]{2,1,0:T(8,128)} parameter(0)
  %new = f32[1,8,128]{2,1,0:T(8,128)} parameter(1)
  %index = s32[] parameter(2)
  ROOT %result = f32[12,8,128]{2,1,0:T(8,128)}
        dynamic-update-slice(%stack, %new, %index, %index, %index)
}
"""
DOUBLING = UPDATING.replace("update-slice(%stack", "update-slice(%doubled").replace(
    "  ROOT", "  %doubled = f32[12,8,128]{2,1,0:T(8,128)} add(%stack, %stack)\n  ROOT"
)
# Calls of the computations above, or of the same operation outside of a fusion.
OPERANDS = "(%stack, %new, %index, %index, %index)"
FUSION = "fusion(%stack, %new, %index), kind=kLoop, calls=%fused"


@pytest.mark.parametrize(
    ("computations", "rows", "call", "tiles_read", "tiles_written"),
    [
        (SLICING, 1, FUSION, 2, 1),
        (UPDATING, 12, FUSION, 1, 1),
        # The updated array is computed first, so all of it is read and written.
        (DOUBLING, 12, FUSION, 13, 12),
        ("", 1, "dynamic-slice(%stack, %index, %index, %index)", 1, 1),
        ("", 12, f"dynamic-update-slice{OPERANDS}", 1, 1),
    ],
)
def test_slices_and_updates_in_place_move_their_own_size(
    computations, rows, call, tiles_read, tiles_written
):
    text = program(
        f"""
    %stack = f32[12,8,128]{{2,1,0:T(8,128)}} parameter(0)
    %new = f32[1,8,128]{{2,1,0:T(8,128)}} parameter(1)
    %index = s32[]{{:S(2)}} parameter(2)
    ROOT %result = f32[{rows},8,128]{{2,1,0:T(8,128)}} {call}
""",
        computations=computations,
    )
    traffic = cost_of(text).operations[-1].traffic
    assert (traffic.read, traffic.written) == (tiles_read * TILE, tiles_written * TILE)


def test_a_copy_of_an_operand_in_another_layout_is_not_a_slice_of_it():
    text = program(
        """
    %a = f32[8,128] parameter(0)
    ROOT %result = f32[128,8] fusion(%a), kind=kLoop, calls=%fused
""",
        computations="""
%fused (a: f32[8,128]) -> f32[128,8] {
  %a = f32[8,128] parameter(0)
  ROOT %turned = f32[128,8] transpose(%a), dimensions={1,0}
}
""",
    )
    assert cost_of(text).hbm_bytes == 2 * TILE


def test_a_scatter_moves_its_rows_and_not_the_table():
    text = program("""
    %table = f32[1000,128]{1,0:T(8,128)} parameter(0)
    %ids = s32[16,1]{0,1:T(1,128)S(1)} parameter(1)
    %rows = f32[16,128]{1,0:T(8,128)} parameter(2)
    ROOT %sum = f32[1000,128]{1,0:T(8,128)} scatter(%table, %ids, %rows), to_apply=%add
""")
    # The rows and the table's rows are read, and their sum is written.
    assert cost_of(text).hbm_bytes == 3 * 16 * 128 * 4


# A loop over (step, stack, x) that writes the square of x into row `step` of the stack. `looped`
# replaces STEP, which is added to the step, and LIMIT, below which it must be.
STATE = "(s32[]{:S(2)}, f32[6,8,128]{2,1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)})"
LOOP = f"""
%body (state: (s32[], f32[6,8,128], f32[8,128])) -> (s32[], f32[6,8,128], f32[8,128]) {{
  %state = {STATE} parameter(0)
  %step = s32[]{{:S(2)}} get-tuple-element(%state), index=0
  %kept = f32[6,8,128]{{2,1,0:T(8,128)}} get-tuple-element(%state), index=1
  %x = f32[8,128]{{1,0:T(8,128)}} get-tuple-element(%state), index=2
  %one = s32[]{{:S(2)}} constant(STEP)
  %next = s32[]{{:S(2)}} add(%step, %one)
  %square = f32[8,128]{{1,0:T(8,128)}} multiply(%x, %x)
  %row = f32[1,8,128]{{2,1,0:T(8,128)}} bitcast(%square)
  %stacked = f32[6,8,128]{{2,1,0:T(8,128)}} dynamic-update-slice(%kept, %row, %step, %step, %step)
  ROOT %result = {STATE} tuple(%next, %stacked, %square)
}}

%condition (state: (s32[], f32[6,8,128], f32[8,128])) -> pred[] {{
  %state = {STATE} parameter(0)
  %step = s32[]{{:S(2)}} get-tuple-element(%state), index=0
  %limit = s32[]{{:S(2)}} LIMIT
  ROOT %less = pred[]{{:S(2)}} compare(%step, %limit), direction=LT
}}
"""


# A condition whose comparison is fused, with the limit as an operand. Tests replace DIRECTION.
FUSED = """
%compare (step: s32[], limit: s32[]) -> pred[] {
  %step = s32[]{:S(2)} parameter(0)
  %limit = s32[]{:S(2)} parameter(1)
  ROOT %less = pred[]{:S(2)} compare(%step, %limit), direction=DIRECTION
}
"""
FUSED_LOOP = LOOP.replace(
    "compare(%step, %limit), direction=LT", "fusion(%step, %limit), kind=kLoop, calls=%compare"
)


def looped(*, step="1", limit="constant(6)", known="", computations=LOOP):
    """Returns a program whose entry is a loop, by default of six rounds.

    `known` has the attributes that a compiler may add to the loop.
    """
    return program(
        f"""
    %start = {STATE} parameter(0)
    ROOT %end = {STATE} while(%start), condition=%condition, body=%body{known}
""",
        computations=computations.replace("STEP", step).replace("LIMIT", limit),
    )


def loops_of(runs):
    return [run for run in runs if isinstance(run, Loop)]


# Five rounds are assumed where the number depends on data.
@pytest.mark.parametrize(
    ("options", "rounds", "is_assumed"),
    [
        ({}, 6, False),
        ({"step": "4"}, 2, False),  # The steps 0 and 4 are below 6.
        ({"known": ', backend_config={"known_trip_count":{"n":"9"}}'}, 9, False),
        ({"limit": "parameter(1)"}, 5, True),
        ({"computations": FUSED.replace("DIRECTION", "LT") + FUSED_LOOP}, 6, False),
        # As long as something is above 0, which is a constant but not a number of rounds.
        ({"computations": FUSED.replace("DIRECTION", "GT") + FUSED_LOOP}, 5, True),
        # No counter from 0 is below it, so the counter does not begin there.
        ({"limit": "constant(0)"}, 5, True),
    ],
)
def test_rounds_of_a_loop(options, rounds, is_assumed):
    runs = executions(parse(looped(**options)), rounds=5)
    [loop] = loops_of(runs)
    assert (loop.rounds, loop.is_assumed) == (rounds, is_assumed)


def test_a_loop_multiplies_what_its_body_costs_and_names_what_it_keeps():
    # The program's call makes two steps, and the cost is that of one.
    cost = cost_of(looped(), steps=2)
    # Each of six rounds reads x twice and writes its square, which it reads and writes as a row.
    assert cost.hbm_bytes == 6 / 2 * (3 + 2) * TILE
    [stack] = cost.stacks
    assert str(stack.array) == "f32[6,8,128]"
    # Two rounds do not fill an array of six.
    assert not cost_of(looped(step="4")).stacks


def test_loops_within_a_loop_of_unknown_rounds_have_one_round():
    inner = LOOP.replace("LIMIT", "parameter(1)").replace("STEP", "1")
    outer = f"""
%outer (state: {STATE}) -> {STATE} {{
  %state = {STATE} parameter(0)
  ROOT %inner_end = {STATE} while(%state), condition=%condition, body=%body
}}
"""
    text = program(
        f"""
    %start = {STATE} parameter(0)
    ROOT %end = {STATE} while(%start), condition=%condition, body=%outer
""",
        computations=inner + outer,
    )
    runs = executions(parse(text), rounds=16)
    outer_loop, inner_loop = loops_of(runs)
    assert outer_loop.rounds == 16
    assert inner_loop.rounds == 1


def test_calls_and_asynchronous_computations_run_once_and_branches_in_part():
    text = program(
        """
    %a = f32[8,128]{1,0:T(8,128)} parameter(0)
    %which = s32[] parameter(1)
    %called = f32[8,128]{1,0:T(8,128)} call(%a), to_apply=%negative
    %begun = ((f32[8,128]{1,0:T(8,128)}), f32[8,128]{1,0:T(8,128)}) async-start(%a),
        calls=%negative
    %ended = f32[8,128]{1,0:T(8,128)} async-done(%begun)
    ROOT %chosen = f32[8,128]{1,0:T(8,128)} conditional(%which, %a, %a),
        branch_computations={%negative, %same}
""",
        computations="""
%negative (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %y = f32[8,128]{1,0:T(8,128)} negate(%x)
}
%same (x: f32[8,128]) -> f32[8,128] {
  ROOT %x = f32[8,128]{1,0:T(8,128)} parameter(0)
}
""",
    )
    # A negation reads a tile and writes one. It is one of two branches. The other moves nothing.
    assert cost_of(text).hbm_bytes == (1 + 1 + 1 / 2) * 2 * TILE


def test_flops_of_dots_convolutions_libraries_and_kernels():
    # The convolution is the same product as the compiler for TPUs writes it: the batch is an axis
    # of a window, and most of its places meet only padding.
    text = program("""
    %a = f32[4,8,16] parameter(0)
    %b = f32[4,16,32] parameter(1)
    %dot = f32[4,8,32] dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2},
        rhs_batch_dims={0}, rhs_contracting_dims={1}
    %convolution = f32[4,8,32] convolution(%a, %b), dim_labels=0bf_0io->0bf,
        window={size=4 stride=3 pad=0_0 lhs_dilate=4}
    %library = f32[4,8,32] custom-call(%a, %b), custom_call_target="__cublas$gemm",
        backend_config={"gemm_backend_config":{"dot_dimension_numbers":
        {"lhs_contracting_dimensions":["2"]}}}
    ROOT %kernel = f32[4,8,32] custom-call(%a, %b), custom_call_target="tpu_custom_call",
        backend_config={"custom_call_config":{"cost_estimate":
        {"flops":"1000","transcendentals":"0","bytes_accessed":"100000"}}}
""")
    # The lines of JSON were only folded for this file.
    cost = cost_of(re.sub(r'":\s+\{"', '":{"', text))
    product = 2 * 4 * 8 * 16 * 32
    assert [run.flops for run in cost.operations[2:]] == [product, product, product, 1000]
    assert cost.kernel_flops == 1000
    # The kernel says that it reads more than its operands once.
    assert cost.operations[-1].traffic.total == 100_000


def multiply_and_hash(left_ref, right_ref, seeds_ref, product_ref, hash_ref):
    product_ref[...] = jnp.dot(left_ref[...], right_ref[...], preferred_element_type=jnp.float32)
    hash_ref[...] = (seeds_ref[...] ^ 5) * 7


@pytest.mark.parametrize("estimated", [0.5, 1.0, 3.0])
def test_a_kernels_estimate_is_checked_against_its_code_and_its_grid(estimated):
    """Four steps multiply [128, 64] by [64, 128] each, and do two integer operations on 8 x 128.

    A low estimate is believed, and the integer operations are then in the same proportion, as if
    steps were left out. A high one is not.
    """
    flops = 4 * 2 * 128 * 64 * 128
    block = functools.partial(pl.BlockSpec, index_map=lambda step: (step, 0))
    kernel = pl.pallas_call(
        multiply_and_hash,
        grid=(4,),
        in_specs=[block((128, 64)), pl.BlockSpec((64, 128), lambda _: (0, 0)), block((8, 128))],
        out_specs=[block((128, 128)), block((8, 128))],
        out_shape=[
            jax.ShapeDtypeStruct((512, 128), jnp.float32),
            jax.ShapeDtypeStruct((32, 128), jnp.int32),
        ],
        cost_estimate=pl.CostEstimate(
            flops=int(estimated * flops), transcendentals=0, bytes_accessed=0
        ),
    )
    traced = jax.jit(kernel).trace(
        jax.ShapeDtypeStruct((512, 64), jnp.float32),
        jax.ShapeDtypeStruct((64, 128), jnp.float32),
        jax.ShapeDtypeStruct((32, 128), jnp.int32),
    )
    lowered = traced.lower(lowering_platforms=("tpu",)).as_text()
    # The text of a compiled program has the same configuration, without the escapes.
    escaped = re.search(r'backend_config = "(.*?)", ', lowered)[1]
    config = json.loads(re.sub(r"\\([0-9A-F]{2})", lambda code: chr(int(code[1], 16)), escaped))
    text = program(f"""
    %left = f32[512,64] parameter(0)
    ROOT %result = f32[512,128] custom-call(%left), custom_call_target="tpu_custom_call",
        backend_config={json.dumps(config, separators=(",", ":"))}
""")
    cost = cost_of(text)
    fraction = min(estimated, 1)
    assert cost.kernel_flops == fraction * flops
    assert cost.integer_ops == fraction * 4 * 2 * 8 * 128
    # Matrix units compute 128 features where there are 64.
    assert cost.operations[-1].padded_flops == 2 * fraction * flops


def test_integer_operations_of_any_hash_count():
    text = program(
        """
    %seed = u32[] parameter(0)
    %x = f32[64,128] parameter(1)
    ROOT %noisy = f32[64,128] fusion(%seed, %x), kind=kLoop, calls=%hash
""",
        computations="""
%hash (seed: u32[], x: f32[64,128]) -> f32[64,128] {
  %seed = u32[] parameter(0)
  %x = f32[64,128] parameter(1)
  %place = u32[64,128] iota(), iota_dimension=1
  %seeds = u32[64,128] broadcast(%seed), dimensions={}
  %mixed = u32[64,128] xor(%place, %seeds)
  %shifted = u32[64,128] shift-right-logical(%mixed, %mixed)
  %product = u32[64,128] multiply(%shifted, %mixed)
  %floats = f32[64,128] convert(%product)
  ROOT %sum = f32[64,128] add(%floats, %x)
}
""",
    )
    # The xor, the shift and the product. Sums of floats do not count.
    assert cost_of(text).integer_ops == 3 * 64 * 128


def test_the_roofline_sum_takes_the_longest_of_each_operation():
    text = program("""
    %a = f32[64,64] parameter(0)
    %product = f32[64,64] dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    ROOT %copy = f32[64,64] copy(%product)
""")
    cost = cost_of(text)
    assert cost.flops == 2 * 64**3
    assert cost.hbm_bytes == 5 * 64 * 64 * 4
    peaks = Peaks(flops=64**3, hbm_bytes=64 * 64 * 4, integer_ops=1)
    # The product takes 2 s of arithmetic and 3 s of bytes, the copy 2 s.
    assert cost.roofline_seconds(peaks) == pytest.approx(5)
    assert cost.bound(peaks) == "memory"
    assert cost.bound(peaks._replace(flops=1)) == "compute"


# Of `a` with 64 bytes. In a ring of n devices, each sends (n - 1) / n of the whole array to gather
# or scatter it, and twice as much to reduce it. Groups are written as lists, as [groups, devices],
# as axes of a mesh, or as a part of an axis. Without groups there is one of all eight.
@pytest.mark.parametrize(
    ("line", "kind", "sent"),
    [
        ("f32[64] all-gather(%a), replica_groups={{0,1,2,3},{4,5,6,7}}", "all-gather", 192),
        ("f32[4] reduce-scatter(%a), replica_groups=[2,4]<=[8]", "reduce-scatter", 48),
        ("f32[16] all-reduce(%a), replica_groups={}", "all-reduce", 2 * 64 * 7 / 8),
        (
            "f32[16] all-reduce(%a), replica_groups=mesh['x'=2,'y'=4] {'y'}",
            "all-reduce",
            2 * 64 * 3 / 4,
        ),
        (
            "f32[16] all-reduce(%a), replica_groups=mesh['x'=8] {'x':(2)4}",
            "all-reduce",
            2 * 64 * 3 / 4,
        ),
        (
            "(f32[16], f32[16], u32[], u32[]) collective-permute-start(%a)",
            "collective-permute",
            64,
        ),
        (
            "(f32[16], f32[128]) all-gather-start(%a), replica_groups=[1,8]<=[8]",
            "all-gather",
            512 * 7 / 8,
        ),
    ],
)
def test_bytes_that_collectives_send(line, kind, sent):
    text = program(
        f"""
    %a = f32[16] parameter(0)
    ROOT %result = {line}
""",
        head=", num_partitions=8",
    )
    cost = cost_of(text)
    [(kind_of_all, total)] = cost.sent_by_kind().items()
    assert kind_of_all == kind
    assert total.sent == sent
    assert cost.sent_bytes == sent
    assert cost.hbm_bytes == 0


def test_an_all_reduce_that_a_fusion_slices_is_a_reduce_scatter():
    text = program(
        """
    %a = f32[16] parameter(0)
    %b = f32[32] parameter(1)
    %i = s32[] parameter(2)
    ROOT %parts = (f32[2], f32[4]) fusion(%a, %b, %i), kind=kCustom, calls=%scattering
""",
        computations="""
%scattering (a: f32[16], b: f32[32], i: s32[]) -> (f32[2], f32[4]) {
  %a = f32[16] parameter(0)
  %b = f32[32] parameter(1)
  %i = s32[] parameter(2)
  %sums = (f32[16], f32[32]) all-reduce(%a, %b), replica_groups={{0,1,2,3,4,5,6,7}}
  %sum_of_a = f32[16] get-tuple-element(%sums), index=0
  %sum_of_b = f32[32] get-tuple-element(%sums), index=1
  %part_of_a = f32[2] dynamic-slice(%sum_of_a, %i), dynamic_slice_sizes={2}
  %part_of_b = f32[4] dynamic-slice(%sum_of_b, %i), dynamic_slice_sizes={4}
  ROOT %result = (f32[2], f32[4]) tuple(%part_of_a, %part_of_b)
}
""",
    )
    [(kind, total)] = cost_of(text).sent_by_kind().items()
    # The arrays of 64 and of 128 bytes are scattered in one collective.
    assert (kind, total.times, total.sent) == ("reduce-scatter", 1, (64 + 128) * 7 / 8)


def test_a_collective_that_is_spread_over_fusions_counts_where_it_starts():
    gather = """
  %a = f32[16] parameter(0)
  %gathered = f32[64] all-gather(%a), replica_groups={{0,1,2,3}},
        frontend_attributes={chain_id="0"}
  ROOT %result = f32[64] custom-call(%gathered), custom_call_target="AsyncCollectiveSTEP"
}
"""
    begin = "\n%begin (a: f32[16]) -> f32[64] {" + gather.replace("STEP", "Start")
    end = "\n%end (a: f32[16]) -> f32[64] {" + gather.replace("STEP", "Done")
    text = program(
        """
    %a = f32[16] parameter(0)
    %begun = f32[64] fusion(%a), kind=kCustom, calls=%begin
    ROOT %ended = f32[64] fusion(%a), kind=kCustom, calls=%end
""",
        computations=begin + end,
    )
    # Once, of four devices.
    assert cost_of(text).sent_bytes == 256 * 3 / 4


# The tables from which a stack frame gets its line of code. Frame 2 is a library's, which frame 1,
# of this project, has called: a parent's number is written one too high.
FRAMES = """
FileNames
1 "/home/me/clone/txl_jax/modules/block.py"
2 "/usr/lib/python3.11/site-packages/optax/base.py"

FunctionNames
1 "call"

FileLocations
1 {file_name_id=1 function_name_id=1 line=40 end_line=40 column=15 end_column=47}
2 {file_name_id=2 function_name_id=1 line=7 end_line=7 column=15 end_column=47}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
"""


def test_movers_are_lines_of_code_and_a_copy_belongs_to_who_uses_it():
    text = program(
        """
    %a = f32[8,128] parameter(0)
    %copied = f32[8,128] copy(%a)
    %b = f32[8,128] negate(%copied), metadata={op_name="jit(f)/layer/neg" stack_frame_id=2}
    ROOT %c = f32[8,128] negate(%b),
        metadata={op_name="jit(f)/neg" source_file="/x/y/z/w.py" source_line=3}
""",
        computations=FRAMES,
    )
    first, second = cost_of(text).movers(2)
    assert (first.source, first.hbm_bytes) == ("txl_jax/modules/block.py:40", 4 * TILE)
    assert (second.source, second.hbm_bytes) == ("y/z/w.py:3", 2 * TILE)


def test_a_scan_that_xla_compiles_has_the_flops_of_its_layers():
    """It is compiled for the CPU, whose text has neither tiles nor memories."""

    def forward(weights, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0].sum()

    weights = jax.ShapeDtypeStruct((6, 128, 128), jnp.float32)
    x = jax.ShapeDtypeStruct((32, 128), jnp.float32)
    text = jax.jit(jax.grad(forward)).lower(weights, x).compile().as_text()
    cost = cost_of(text)
    # A product forward, and two backward.
    assert cost.flops == 6 * 3 * 2 * 32 * 128 * 128
    assert {stack.array.dims[0] for stack in cost.stacks} == {6}
