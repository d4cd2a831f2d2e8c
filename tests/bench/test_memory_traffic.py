"""Tests of the bytes and arrays counted from a compiled program's text, beside XLA's own count."""

import jax
import jax.numpy as jnp
import pytest

from txl_jax.bench import memory_traffic

# A loop of 5 rounds: each slices one row of 8, and updates one row of the result in place.
TEXT = """\
HloModule jit_f, is_scheduled=true

%row (a: f32[5,8], i: s32[]) -> f32[8] {
  %a = f32[5,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %same = f32[5,8]{1,0} bitcast(%a)
  %piece = f32[1,8]{1,0} dynamic-slice(%same, %i, %i), dynamic_slice_sizes={1,8}
  ROOT %flat = f32[8]{0} bitcast(%piece)
}

%put (out: f32[5,8], x: f32[8], i: s32[]) -> f32[5,8] {
  %out = f32[5,8]{1,0} parameter(0)
  %x = f32[8]{0} parameter(1)
  %i.2 = s32[] parameter(2)
  %one = f32[1,8]{1,0} bitcast(%x)
  ROOT %updated = f32[5,8]{1,0} dynamic-update-slice(%out, %one, %i.2, %i.2)
}

%body (p: (s32[], f32[5,8], f32[5,8])) -> (s32[], f32[5,8], f32[5,8]) {
  %p = (s32[], f32[5,8], f32[5,8]{1,0:T(8,128)(2,1)}) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %in = f32[5,8]{1,0} get-tuple-element(%p), index=1
  %to = f32[5,8]{1,0} get-tuple-element(%p), index=2
  %sliced = f32[8]{0} fusion(%in, %n), kind=kLoop, calls=%row
  %kernel = (f32[8]{0}, bf16[3]{0:T(256)}) custom-call(%sliced, %in), custom_call_target="k"
  %first = f32[8]{0} get-tuple-element(%kernel), index=0
  %done = f32[5,8]{1,0} fusion(%to, %first, %n), kind=kLoop, calls=%put
  ROOT %t = (s32[], f32[5,8], f32[5,8]) tuple(%n, %in, %done)
}

%condition (p: (s32[], f32[5,8], f32[5,8])) -> pred[] {
  ROOT %c = pred[] constant(true)
}

ENTRY %main (x: f32[5,8]) -> f32[5,8] {
  %x.1 = f32[5,8]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[5,8], f32[5,8]) tuple(%zero, %x.1, %x.1)
  %loop = (s32[], f32[5,8], f32[5,8]) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %result = f32[5,8]{1,0} get-tuple-element(%loop), index=2
}
"""  # noqa: E501


def test_a_loop_counts_as_often_as_it_runs_and_slices_of_its_arrays_count_alone():
    row, index, whole = 8 * 4, 4, 5 * 8 * 4
    sliced, kernel, put = row + index + row, row + whole + row + 3 * 2, row + index + row
    assert memory_traffic.bytes_accessed(TEXT) == 5 * (sliced + kernel + put)
    written = {str(array) for array in memory_traffic.arrays_written(TEXT)}
    assert written == {"f32[8]", "bf16[3]", "f32[5,8]"}


@pytest.mark.parametrize("function", [lambda a, b: jnp.exp(a @ b), lambda a, b: jnp.cumsum(a, 0) @ b[:, :7]])
def test_it_is_what_xla_counts(function):
    a, b = jnp.ones((64, 48)), jnp.ones((48, 32))
    compiled = jax.jit(function).lower(a, b).compile()
    expected = compiled.cost_analysis()["bytes accessed"]
    assert memory_traffic.bytes_accessed(compiled.as_text()) == pytest.approx(expected, rel=0.2)
    assert memory_traffic.bytes_of_program(compiled) == expected


def test_xla_counts_a_loop_once_and_we_do_not():
    a = jnp.ones((64, 64))

    def function(a):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ a), None), a, None, length=50)[0]

    compiled = jax.jit(function).lower(a).compile()
    assert compiled.cost_analysis()["bytes accessed"] < 10 * a.nbytes
    assert 50 * 3 * a.nbytes <= memory_traffic.bytes_of_program(compiled) < 50 * 8 * a.nbytes


def test_a_copy_that_overlaps_counts_once():
    text = """\
HloModule jit_f

ENTRY %main (x: f32[4,8]) -> f32[4,8] {
  %x.1 = f32[4,8]{1,0} parameter(0)
  %s = ((f32[4,8]{1,0}), f32[1,8]{1,0:T(1,128)S(1)}, s32[]{:S(4)}) slice-start(%x.1), slice={[0:1], [0:8]}
  %d = f32[1,8]{1,0:S(1)} slice-done(%s)
  %c = (f32[4,8]{1,0:S(1)}, f32[4,8]{1,0}, u32[]{:S(2)}) copy-start(%x.1)
  %e = f32[4,8]{1,0:S(1)} copy-done(%c)
  %j = f32[4,8]{1,0:S(1)} custom-call(%d, %d), custom_call_target="ConcatBitcast"
  ROOT %r = f32[4,8]{1,0} add(%e, %j)
}
"""
    assert memory_traffic.bytes_accessed(text) == 2 * 32 + 2 * 128 + 3 * 128
    assert [array.shape for array in memory_traffic.arrays_written(text)] == [(1, 8), (4, 8), (4, 8)]
