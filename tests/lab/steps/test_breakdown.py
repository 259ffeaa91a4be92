"""Kernels by their names, and FlashAttention-4's operators with a stand-in for its package."""

import sys

import pytest

from benchmarks import breakdown
from lab.steps import flash_attention_4
from lab.steps.registry import Choice

# as the profiler prints them on an H200, cut off; of FlashAttention-2, inductor and torch by their sources
NAMES = {
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1": "attention",
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*, void const*, void*, void*, u": "passes",
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4, false>": "attention",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash": "attention",
    "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, pytorch_flash::Flash_bwd_kernel_traits<64, 128,": "passes",
    "void pytorch_flash::flash_bwd_convert_dq_kernel<pytorch_flash::Flash_bwd_kernel_traits<64, 128, 128": "passes",
    "kernel_cutlass_kernel_sagebwdkernelssm90forwardForward_object_at__CopyAtom_ThrID10_TVLayoutSrc11": "attention",
    "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensor000": "attention",
    "kernel_cutlass_kernel_flash_attncuteflash_bwd_preprocessFlashAttentionBackwardPreprocess_object_": "passes",
    "kernel_cutlass_kernel_flash_attncuteflash_bwd_postprocessFlashAttentionBackwardPostprocess_objec": "passes",
    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloop": "attention",
    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnBwdSm90<flash::CollectiveMainloop": "attention",
    "void cutlass::device_kernel<flash::FlashAttnBwdPreprocess<cute::tuple<cute::C<64>, cute::C<128>": "passes",
    "void cutlass::device_kernel<flash::FlashAttnBwdPostprocessConvertdQ<cute::tuple<cute::C<64>, cute": "passes",
    "triton_tem_fused_flex_attention_0": "attention",
    "triton_tem_fused_clone_flex_attention_backward_mul_zeros_5": "attention",
    "fmha_cutlassB_bf16_aligned_128x64_k128_sm80(PyTorchMemEffAttention::AttentionBackwardKernel": "attention",
    "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(at::Tensor": "copies",
    "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(at": "copies",
    "Memcpy DtoD (Device -> Device)": "copies",
    "triton_poi_fused__unsafe_view_clone_transpose_3": "copies",
    "triton_poi_fused_add_clone_cos_mul_5": "other",
    "triton_red_fused__to_copy_mean_mul_pow_rsqrt_0": "other",
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT": "other",
    "Memset (Device)": "other",
}  # fmt: skip


@pytest.mark.parametrize(("kernel", "part"), NAMES.items())
def test_whose_a_kernel_is(kernel, part):
    assert breakdown.part_of(kernel) == part


def test_kernels_of_this_project_are_told_by_their_folder():
    own = breakdown.own_kernels()
    passes = {"quantize_kernel", "statistics_kernel", "grad_out_kernel", "row_values_kernel", "key_codes_kernel"}
    passes |= {"query_codes", "key_codes", "finish_gradients", "quantize", "row_values", "finish"}
    passes |= {"weigh_kernel", "gradient_kernel"}  # of sinks
    attention = {"forward_kernel", "dq_kernel", "dkdv_kernel", "backward_kernel", "value_kernel", "key_query_kernel"}
    attention |= {"forward", "backward"}
    assert {name for name, part in own.items() if part == "attention"} == attention
    assert passes <= {name for name, part in own.items() if part == "passes"}
    assert {breakdown.part_of(name) for name in own} == {"attention", "passes"}


def test_without_flash_attention_4(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
    flash_attention_4._interface.cache_clear()
    with pytest.raises(ValueError, match="'fa4' needs flash-attn-4"):
        Choice.parse("fa4", "cpu")
