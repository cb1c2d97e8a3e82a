// A CUDA device for a CPU build of torch. Its memory is the host's, and the CPU's kernels compute; but tensors say that
// they are on cuda:0, and operations across the two devices are refused, as by a GPU. Loaded before torch, which looks
// for hooks once.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <set>

namespace at {

struct CUDAHooks final : CUDAHooksInterface {  // torch looks for this very name
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

namespace {

using c10::DispatchKey;
const c10::Device GPU(c10::DeviceType::CUDA, 0), HOST(c10::DeviceType::CPU);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return GPU; }
  c10::Device getDevice() const override { return GPU; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, GPU); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

c10::Storage storage_of(c10::DataPtr memory, size_t bytes) {
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(memory), c10::GetCPUAllocator(), true);
}

// Takes the memory out of a storage of the host.
c10::DataPtr onto_gpu(const c10::Storage& storage) {
  auto memory = storage.unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr());
  memory.unsafe_set_device(GPU);
  return memory;
}

at::Tensor tensor_of(const c10::Storage& storage, const at::Tensor& like, DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return made;
}

// One operation: its tensors of the GPU, and tensors of the host that share their memory.
struct Call {
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors;
  std::vector<std::pair<c10::Storage, c10::Storage>> storages;
  std::set<c10::StorageImpl*> of_host;  // of arguments that are on the host
  std::optional<c10::Device> asked;
  bool gpu = false, host = false;  // devices of the arguments; a number on the host may be used with any tensor

  at::Tensor taken(const at::Tensor& tensor, bool counts) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      host |= counts && tensor.dim() > 0;
      of_host.insert(tensor.storage().unsafeGetStorageImpl());
      return tensor;
    }
    gpu = true;
    for (auto& [mine, theirs] : tensors)
      if (mine.is_same(tensor)) return theirs;
    c10::Storage shared;
    for (auto& [mine, theirs] : storages)
      if (mine.is_alias_of(tensor.storage())) shared = theirs;
    if (!shared) {
      auto given = tensor.storage();
      shared = storage_of(c10::DataPtr(given.mutable_data(), HOST), given.nbytes());
      storages.emplace_back(given, shared);
    }
    tensors.emplace_back(tensor, tensor_of(shared, tensor, DispatchKey::CPU));
    return tensors.back().second;
  }

  at::Tensor returned(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.is_cuda()) return tensor;
    for (auto& [mine, theirs] : tensors)
      if (theirs.is_same(tensor)) return mine;
    for (auto& [mine, theirs] : storages)
      if (theirs.is_alias_of(tensor.storage())) return tensor_of(mine, tensor, DispatchKey::CUDA);
    bool stays = of_host.count(tensor.storage().unsafeGetStorageImpl());
    if (stays || (asked ? !asked->is_cuda() : !gpu)) return tensor;
    auto bytes = tensor.storage().nbytes();
    return tensor_of(storage_of(onto_gpu(tensor.storage()), bytes), tensor, DispatchKey::CUDA);
  }

  // Operations may give their arguments another shape, and more memory.
  void resize() {
    for (auto& [mine, theirs] : storages)
      if (theirs.data() != mine.data() || theirs.nbytes() != mine.nbytes()) {
        mine.set_nbytes(theirs.nbytes());
        mine.unsafeGetStorageImpl()->set_data_ptr_noswap(onto_gpu(theirs));
      }
    for (auto& [mine, theirs] : tensors)
      if (mine.sizes() != theirs.sizes() || mine.strides() != theirs.strides()) {
        mine.unsafeGetTensorImpl()->set_storage_offset(theirs.storage_offset());
        mine.unsafeGetTensorImpl()->set_sizes_and_strides(theirs.sizes(), theirs.strides());
      }
  }
};

template <class Change>
c10::IValue changed(const c10::IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor(), true);
  if (value.isTensorList()) {
    c10::List<at::Tensor> all;
    for (const at::Tensor& tensor : value.toTensorVector()) all.push_back(change(tensor, true));
    return all;
  }
  if (value.isOptionalTensorList()) {  // indices, which a GPU also takes from the host
    c10::List<std::optional<at::Tensor>> all;
    for (std::optional<at::Tensor> tensor : value.toOptionalTensorList())
      all.push_back(tensor ? std::make_optional<at::Tensor>(change(*tensor, false)) : std::nullopt);
    return all;
  }
  return value;
}

void compute(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Call call;
  for (auto at = stack->end() - op.schema().arguments().size(); at != stack->end(); ++at) {
    if (at->isDevice()) {
      call.asked = at->toDevice();
      *at = HOST;
    } else {
      *at = changed(*at, [&](const at::Tensor& tensor, bool counts) { return call.taken(tensor, counts); });
    }
  }
  TORCH_CHECK(!(call.host && call.gpu) || op.operator_name().name == "aten::copy_",
              "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (",
              op.operator_name(), ")");
  op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
  call.resize();
  for (auto at = stack->end() - op.schema().returns().size(); at != stack->end(); ++at)
    *at = changed(*at, [&](const at::Tensor& tensor, bool) { return call.returned(tensor); });
}

// The kernels for attention on a GPU have no counterparts on the host, except one.
int64_t math(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
             std::optional<double>, bool) {
  return 0;
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&compute>());
  m.impl("_fused_sdp_choice", math);
}

}  // namespace
