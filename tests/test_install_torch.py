"""tools/install_torch.py takes PyTorch's CPU index only where CUDA would come and nothing could use it."""

from install_torch import CPU_INDEX, explain_choice, extra_pip_arguments, pinned_version


def report_of(*names: str) -> dict:
    """What `pip install --dry-run --report` writes, as far as we read it."""
    return {"version": "1", "install": [{"metadata": {"name": name, "version": "1.0"}} for name in names]}


WITH_CUDA = report_of("torch", "sympy", "nvidia-cublas", "triton")
WITHOUT_CUDA = report_of("torch", "sympy")


def test_cuda_without_a_driver_takes_the_cpu_index():
    assert extra_pip_arguments(WITH_CUDA, has_driver=False) == ["--index-url", CPU_INDEX]
    assert "no NVIDIA driver" in explain_choice(WITH_CUDA, has_driver=False)


def test_cuda_with_a_driver_is_left_to_pip():
    assert extra_pip_arguments(WITH_CUDA, has_driver=True) == []
    assert "is an NVIDIA driver" in explain_choice(WITH_CUDA, has_driver=True)


def test_no_cuda_is_left_to_pip():
    assert extra_pip_arguments(WITHOUT_CUDA, has_driver=False) == []
    assert extra_pip_arguments(WITHOUT_CUDA, has_driver=True) == []
    assert "no CUDA" in explain_choice(WITHOUT_CUDA, has_driver=False)


def test_a_package_that_only_mentions_nvidia_is_no_cuda():
    assert extra_pip_arguments(report_of("torch", "not-nvidia"), has_driver=False) == []


def test_the_pin_is_read_from_its_own_line():
    assert pinned_version("torch", "# torch==1.0\npytorch==2.0\ntorch==2.13.0\n") == "2.13.0"
