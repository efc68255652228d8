// The C++ RPC agent of torch, made to note every message that leaves it: the truth that our records are tested against.
//
// Requests and replies leave through `pipeWrite`, where type, number, payload and tensors are known. Whom a request goes
// to only `send` knows, which is called before, in the same thread.
#include <torch/extension.h>

#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/request_callback_impl.h>
#include <torch/csrc/distributed/rpc/tensorpipe_agent.h>
#include <torch/csrc/utils/pybind.h>

#include <mutex>

using namespace torch::distributed::rpc;

namespace {

struct Sent {
  int64_t at_ns;
  int type;
  int64_t id;
  int64_t payload_bytes;
  int64_t tensor_count;
  int64_t tensor_bytes;
  std::string payload;
};

std::mutex lock;
std::vector<Sent> sent;

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000LL + time.tv_nsec;
}

int64_t bytes_of(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return 0;
  }
  if (tensor.is_sparse()) {
    return tensor._indices().nbytes() + tensor._values().nbytes();
  }
  return tensor.nbytes();
}

void note(const Message& message) {
  Sent record;
  record.at_ns = now_ns();
  record.type = static_cast<int>(message.type());
  record.id = message.id();
  record.payload_bytes = message.payload().size();
  record.payload = std::string(message.payload().begin(), message.payload().end());
  record.tensor_count = message.tensors().size();
  record.tensor_bytes = 0;
  for (const auto& tensor : message.tensors()) {
    record.tensor_bytes += bytes_of(tensor);
  }
  std::lock_guard<std::mutex> guard(lock);
  sent.push_back(std::move(record));
}

struct LogAgent : public TensorPipeAgent {
  using TensorPipeAgent::TensorPipeAgent;

  void pipeWrite(
      const std::shared_ptr<tensorpipe::Pipe>& pipe,
      const c10::intrusive_ptr<Message>& message,
      std::vector<c10::Device>&& devices,
      std::vector<c10::Stream> streams,
      std::function<void(const tensorpipe::Error&)> then) noexcept override {
    note(*message);
    TensorPipeAgent::pipeWrite(pipe, message, std::move(devices), std::move(streams), std::move(then));
  }
};

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::module::import("torch.distributed.rpc");
  py::class_<LogAgent, TensorPipeAgent, std::shared_ptr<LogAgent>>(module, "LogAgent")
      .def(py::init([](const c10::intrusive_ptr<::c10d::Store>& store,
                       std::string name,
                       worker_id_t id,
                       std::optional<int> world_size,
                       TensorPipeRpcBackendOptions options,
                       std::unordered_map<std::string, DeviceMap> reverse_device_maps,
                       std::vector<c10::Device> devices) {
        return std::shared_ptr<LogAgent>(new LogAgent(
            store,
            std::move(name),
            id,
            world_size,
            std::move(options),
            std::move(reverse_device_maps),
            std::move(devices),
            std::make_unique<RequestCallbackImpl>()));
      }));
  module.def("sent", []() {
    std::lock_guard<std::mutex> guard(lock);
    py::list found;
    for (const auto& each : sent) {
      found.append(py::make_tuple(
          each.at_ns,
          each.type,
          each.id,
          each.payload_bytes,
          each.tensor_count,
          each.tensor_bytes,
          py::bytes(each.payload)));
    }
    return found;
  });
}
