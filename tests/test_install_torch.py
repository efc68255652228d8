"""tools/install_torch.py takes PyTorch's CPU index only where CUDA would come and nothing could use it."""

import pytest
from install_torch import CPU_INDEX, explain_choice, extra_pip_arguments, pinned_version


@pytest.mark.parametrize(
    ("brought", "has_driver", "arguments", "said"),
    [
        (["nvidia-cublas", "triton"], False, ["--index-url", CPU_INDEX], "there is no NVIDIA driver here"),
        (["nvidia-cublas", "triton"], True, [], "there is an NVIDIA driver here"),
        (["sympy", "not-nvidia"], False, [], "it brings no CUDA packages"),
    ],
)
def test_the_cpu_index_is_for_cuda_without_a_driver(brought, has_driver, arguments, said):
    # What `pip install --dry-run --report` writes, as far as we read it.
    report = {"install": [{"metadata": {"name": name}} for name in ["torch", *brought]]}
    assert extra_pip_arguments(report, has_driver=has_driver) == arguments
    assert said in explain_choice(report, has_driver=has_driver)
    assert pinned_version("torch", "# torch==1.0\npytorch==2.0\ntorch==2.13.0\n") == "2.13.0"
