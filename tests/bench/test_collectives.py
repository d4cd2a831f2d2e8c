"""Tests what is read of a compiled program's text, in the ways of writing of XLA's backends."""

# ruff: noqa: E501
import pytest

from txl_jax.bench.collectives import collectives, crossings

# A loop of 5 rounds within a fusion's neighbour, with the rounds known to XLA; and one with the rounds in its condition.
TEXT = """\
HloModule jit_f, is_scheduled=true, num_partitions=8

%add.1 (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum.1 = f32[] add(%a, %b)
}

%body.2 (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %all-gather.3 = bf16[16,8]{1,0:T(8,128)(2,1)} all-gather(%x), channel_id=5, replica_groups=[2,4]<=[8], dimensions={0}, metadata={op_name="jit(f)/while/body/layers/dot"}
  %all-reduce.4 = (f32[4,8]{1,0}, pred[8]{0}) all-reduce(%y, %z), channel_id=6, replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add.1
}

%condition.2 (p: (s32[], f32[4,8])) -> pred[] {
  %limit.1 = s32[]{:T(128)} constant(3)
  ROOT %compare.5 = pred[] compare(%i.1, %limit.1), direction=LT
}

%piece.1 (p: f32[2]) -> f32[4] {
  %all-gather.9 = f32[4]{0} all-gather(%p), channel_id=7, replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_1'}, frontend_attributes={chain_id="0"}, metadata={op_name="a"}
}

%piece.2 (p: f32[2]) -> f32[4] {
  %all-gather.10 = f32[4]{0:S(1)} all-gather(%p), channel_id=7, replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_1'}, frontend_attributes={chain_id="0"}, metadata={op_name="a"}
}

%all-reduce-scatter.1 (p: f32[8,8]) -> f32[2,8] {
  %all-reduce.7 = f32[8,8]{1,0} all-reduce(%p), channel_id=12, replica_groups=[2,4]<=[8], to_apply=%add.1
  ROOT %slice.1 = f32[2,8]{1,0} dynamic-slice(%all-reduce.7, %i), dynamic_slice_sizes={2,8}
}

%outer.1 (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %while.2 = (s32[], f32[4,8]{1,0}) while(%t), condition=%condition.2, body=%body.2
  %fusion.1 = f32[4]{0} fusion(%p), kind=kLoop, calls=%piece.1
  %fusion.2 = f32[4]{0} fusion(%p), kind=kLoop, calls=%piece.2
}

%unknown.1 (p: (s32[], f32[4,8])) -> pred[] {
  ROOT %compare.6 = pred[] compare(%i.2, %n.2), direction=LT
}

ENTRY %main.9 (Arg_0.1: f32[4,8]) -> f32[4,8] {
  %while.1 = (s32[], f32[4,8]{1,0}) while(%t), condition=%unknown.1, body=%outer.1, backend_config={"known_trip_count":{"n":"5"}}
  %ags.1 = (f32[2,8]{1,0}, f32[16,8]{1,0}) all-gather-start(%Arg_0.1), channel_id=8, replica_groups={}, dimensions={0}
  %permute.1 = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%x), channel_id=9, source_target_pairs={{0,1},{1,0}}
  %pair.1 = ((f32[2]{0}, f32[3]{0}), (f32[8]{0}, f32[12]{0})) all-gather-start(%x, %y), channel_id=11, replica_groups=mesh['axis_0'=2,'axis_1'=4], device_ids=([2,4]T(1,0)) {'axis_1'}
  %scatter.1 = f32[2,8]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
  %alone.1 = f32[4]{0} all-reduce(%x), channel_id=10, replica_groups=[8,1]<=[8], to_apply=%add.1
}
"""


def test_each_collective_is_found_with_its_bytes_its_group_and_how_often_it_runs():
    found = {(one.kind, one.shape): one for one in collectives(TEXT)}
    facts = {key: (one.n_bytes, one.devices, one.loops, one.times, one.source) for key, one in found.items()}
    assert facts == {
        ("all-gather", "bf16[16,8]"): (256, 4, 2, 15, "jit(f)/while/body/layers/dot"),
        ("all-reduce", "f32[4,8]"): (136, 2, 2, 15, ""),
        ("all-gather", "f32[4]"): (16, 2, 1, 5, "a"),  # In two pieces, once.
        ("all-gather", "f32[16,8]"): (512, 8, 0, 1, ""),
        ("collective-permute", "f32[4]"): (16, 2, 0, 1, ""),
        ("all-gather", "f32[12]"): (80, 4, 0, 1, ""),  # Two arrays at once.
        ("reduce-scatter", "f32[8,8]"): (64, 4, 0, 1, ""),  # Of which a device keeps a quarter.
    }
    assert len(collectives(TEXT)) == 7


def test_groups_written_in_an_unknown_way_are_not_guessed():
    with pytest.raises(ValueError, match=r"replica_groups=ring\(8\)"):
        collectives(TEXT.replace("replica_groups={}", "replica_groups=ring(8)"))


@pytest.mark.parametrize(("kind", "expected"), [
    ("all-gather", 256 * 3 / 4), ("all-reduce", 2 * 136 / 2), ("collective-permute", 16), ("reduce-scatter", 256 * 3 / 4)
])  # fmt: skip
def test_bytes_that_a_device_sends(kind, expected):
    """Bytes sent: of an all-gather all parts but the own, of an all-reduce twice that, of a reduce-scatter half of the latter."""
    first = next(
        one
        for one in collectives(TEXT)
        if one.kind == kind and (one.loops == 2 or kind in ("collective-permute", "reduce-scatter"))
    )
    assert first.bytes_sent == expected


def test_a_program_for_one_device_sends_nothing():
    assert collectives("HloModule jit_f\n\nENTRY %main (a: f32[]) -> f32[] {\n}\n") == []


# Of a step for two slices of v5e:4x4 (jax 0.10.2, libtpu 0.0.42.1), without what is not read. A slice has 16 partitions.
SLICED = """\
HloModule jit_step, is_scheduled=true, num_partitions=16

%body.1 (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %all-gather.7 = bf16[1024,2048]{1,0:T(8,128)(2,1)S(1)} all-gather(%param), channel_id=2, replica_groups={{0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15}}, dimensions={0}
  %send.1 = (bf16[128,8,128]{2,1,0:T(8,128)(2,1)}, u32[], token[]) send(%bitcast.1, %after-all), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="all-reduce.1_0",_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2}x{0:15}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv.1 = (bf16[128,8,128]{2,1,0:T(8,128)(2,1)}, u32[], token[]) recv(%after-all), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="all-reduce.1_0",_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2}x{0:15}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv-done.1 = (bf16[128,8,128]{2,1,0:T(8,128)(2,1)}, token[]) recv-done(%recv.1), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}
}

%limit.1 (p: (s32[], f32[4,8])) -> pred[] {
  ROOT %compare.6 = pred[] compare(%i.2, %n.2), direction=LT
}

ENTRY %main.9 (Arg_0.1: f32[4,8]) -> f32[4,8] {
  %while.1 = (s32[], f32[4,8]{1,0}) while(%t), condition=%limit.1, body=%body.1, backend_config={"known_trip_count":{"n":"12"}}
}
"""


def test_what_crosses_slices_is_a_transfer_through_the_hosts():
    [found] = crossings(SLICED, 2)
    assert (found.kind, found.shape, found.n_bytes, found.devices) == ("all-reduce", "bf16[128,8,128]", 2 << 17, 2)
    assert (found.loops, found.times, found.bytes_sent) == (1, 12, 2 << 17)
    [within] = collectives(SLICED)
    assert (within.kind, within.devices) == ("all-gather", 16)
    [gathered] = crossings(SLICED.replace('type="ALL_REDUCE"', 'type="ALL_GATHER"'), 4)
    assert (gathered.kind, gathered.devices) == ("all-gather", 4)
    with pytest.raises(ValueError, match="one-to-one"):
        crossings(SLICED.replace('type="ALL_REDUCE"', 'type="ONE_TO_ONE"'), 2)
