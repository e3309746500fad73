// The operators of the simulated accelerator. All but a few are one boxed fallback: the tensors of the device are seen as
// tensors of the CPU, in the same memory, and the CPU's kernel does the work. Nothing is copied but fresh results.
#include "runtime.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/sparse_resize_and_clear_native.h>
#include <ATen/ops/values_native.h>
#include <ATen/ops/zero_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_map>

namespace sim {

// The same memory as a tensor of the CPU. Keeps the memory alive.
at::Tensor as_cpu(const at::Tensor& tensor, const c10::Storage& storage) {
  auto cpu = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = cpu.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    impl->set_wrapped_number(true);
  return cpu;
}

c10::Storage cpu_storage(const c10::Storage& storage) {
  auto* keep = new c10::Storage(storage);
  auto release = [](void* kept) { delete static_cast<c10::Storage*>(kept); };
  return c10::Storage(
      c10::Storage::use_byte_size_t(), storage.nbytes(), at::DataPtr(real_address(storage.data()), keep, release, at::kCPU),
      c10::GetAllocator(at::kCPU), true);
}

at::Tensor as_cpu(const at::Tensor& tensor) {
  if (tensor.device().type() == SIM && tensor.is_sparse())
    return at::_sparse_coo_tensor_unsafe(
        as_cpu(tensor._indices()), as_cpu(tensor._values()), tensor.sizes(), std::nullopt, std::nullopt, std::nullopt,
        std::nullopt, tensor.is_coalesced());
  return tensor.device().type() == SIM ? as_cpu(tensor, cpu_storage(tensor.storage())) : tensor;
}

namespace {

const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);
const auto GENERATOR = c10::OptionalType::create(c10::GeneratorType::get());

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device->has_index() ? device : std::nullopt);
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(SIM), KEYS, c10::dtype_or_default(dtype));
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::OptionalDeviceGuard guard(device->has_index() ? device : std::nullopt);
  return at::detail::empty_generic(size, c10::GetAllocator(SIM), KEYS, c10::dtype_or_default(dtype), format);
}

// A view: shares memory with an argument, and launches nothing.
bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite())
      return true;
  static const std::set<std::string> others{"aten::resize_", "aten::set_", "aten::is_set_to", "aten::is_pinned"};
  return others.count(schema.name()) > 0;
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

template <typename Visit>
void for_each_tensor(const c10::IValue& value, Visit visit) {
  if (value.isTensor())
    visit(value.toTensor());
  else if (value.isTensorList())
    for (const at::Tensor& tensor : value.toTensorList())
      visit(tensor);
  else if (value.isOptionalTensorList())
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
      visit(tensor.value_or(at::Tensor()));
}

template <typename Change>
c10::IValue with_tensors(const c10::IValue& value, Change change) {
  if (value.isTensor())
    return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> all;
    for (const at::Tensor& tensor : value.toTensorList())
      all.push_back(change(tensor));
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> all;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
      all.push_back(tensor ? std::optional(change(*tensor)) : std::nullopt);
    return all;
  }
  return value;
}

at::Tensor view_of(const at::Tensor& base, const at::Tensor& cpu) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), cpu.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
  if (cpu.unsafeGetTensorImpl()->is_wrapped_number())
    view.unsafeGetTensorImpl()->set_wrapped_number(true);
  return view;
}

thread_local const std::vector<at::Tensor>* reused = nullptr; // where the operator that is replayed puts its results

} // namespace

at::Tensor without_autograd(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_sparse() ? view_of(tensor, tensor) : tensor;
}

namespace {

// The tensors of one call, on the device and as the CPU sees them.
class Translation {
 public:
  std::vector<at::Tensor> made; // results in memory of their own

  at::Tensor to_cpu(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != SIM)
      return tensor;
    if (tensor.is_sparse()) {
      auto cpu = as_cpu(tensor);
      originals_.emplace(cpu.unsafeGetTensorImpl(), tensor);
      kept_.push_back(cpu);
      return cpu;
    }
    auto [seen, fresh] = storages_.try_emplace(tensor.storage().unsafeGetStorageImpl());
    if (fresh)
      seen->second = cpu_storage(tensor.storage()); // one for all that share it: kernels look for overlaps
    auto cpu = as_cpu(tensor, seen->second);
    originals_.emplace(cpu.unsafeGetTensorImpl(), tensor);
    kept_.push_back(cpu);
    devices_.emplace(seen->second.unsafeGetStorageImpl(), tensor);
    return cpu;
  }

  // After the kernel: arguments that it resized, as resize_() and out= do.
  void write_back() {
    for (const auto& cpu : kept_) {
      auto original = originals_.at(cpu.unsafeGetTensorImpl());
      if (cpu.is_sparse())
        continue;
      const auto& storage = original.storage();
      if (cpu.storage().data() != real_address(storage.data())) {
        at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(storage, cpu.storage().nbytes());
        std::memcpy(real_address(storage.data()), cpu.storage().data(), cpu.storage().nbytes());
      }
      if (cpu.sizes() != original.sizes() || cpu.strides() != original.strides() || cpu.storage_offset() != original.storage_offset())
        original.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
  }

  at::Tensor to_device(const at::Tensor& cpu, at::Device device, Launch& launch) {
    if (!cpu.defined() || !cpu.is_cpu())
      return cpu;
    if (auto argument = originals_.find(cpu.unsafeGetTensorImpl()); argument != originals_.end()) {
      if (cpu.is_sparse()) { // written in place
        auto& impl = static_cast<at::SparseTensorImpl&>(*argument->second.unsafeGetTensorImpl());
        impl.raw_resize_(cpu.sparse_dim(), cpu.dense_dim(), cpu.sizes());
        impl.set_indices_and_values_unsafe(to_device(cpu._indices(), device, launch), to_device(cpu._values(), device, launch));
        impl.set_coalesced(cpu.is_coalesced());
      }
      return argument->second;
    }
    if (cpu.is_sparse())
      return at::_sparse_coo_tensor_unsafe(
          to_device(cpu._indices(), device, launch), to_device(cpu._values(), device, launch), cpu.sizes(), std::nullopt,
          std::nullopt, std::nullopt, std::nullopt, cpu.is_coalesced());
    if (auto base = devices_.find(cpu.storage().unsafeGetStorageImpl()); base != devices_.end())
      return view_of(base->second, cpu);
    auto result = reused ? reused->at(made.size())
                         : empty_strided(cpu.sizes(), cpu.strides(), cpu.scalar_type(), at::kStrided, device, false);
    made.push_back(without_autograd(result));
    if (cpu.numel() > 0)
      std::memcpy(
          real_address(result.data_ptr()), cpu.const_data_ptr(),
          at::detail::computeStorageNbytes(cpu.sizes(), cpu.strides(), cpu.element_size()));
    launch.wrote(result);
    return result;
  }

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
  std::unordered_map<c10::StorageImpl*, at::Tensor> devices_; // by the CPU's storage
  std::unordered_map<c10::TensorImpl*, at::Tensor> originals_; // by the CPU's tensor
  std::vector<at::Tensor> kept_;
};

std::optional<at::Device> device_among(const c10::ArrayRef<c10::IValue>& arguments) {
  std::optional<at::Device> found;
  for (const auto& value : arguments) {
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (!found && tensor.defined() && tensor.device().type() == SIM)
        found = tensor.device();
    });
    if (!found && value.isDevice() && value.toDevice().type() == SIM)
      found = value.toDevice();
  }
  return found;
}

// A real device has to know these on the host before it can go on.
bool synchronizes(const c10::OperatorHandle& op, const c10::ArrayRef<c10::IValue>& arguments) {
  if (op.hasTag(at::Tag::data_dependent_output))
    return true;
  bool masks = false, indices = false;
  // `x[mask] = number` fills where the mask is, without a list of these places.
  if (op.schema().name() == "aten::_index_put_impl_" && arguments[2].toTensor().numel() == 1) {
    const auto places = arguments[1].toOptionalTensorList();
    if (places.size() == 1)
      return false;
  }
  for (const auto& value : arguments)
    if (value.isOptionalTensorList()) {
      indices = true;
      for_each_tensor(value, [&](const at::Tensor& index) {
        masks |= index.defined() && (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte);
      });
    }
  return masks || (!indices && op.hasTag(at::Tag::dynamic_output_shape));
}

// The numbers of kernels that draw from the default generator of the CPU, whatever their arguments, as native_dropout does.
struct BorrowDefaultGenerator {
  static inline std::recursive_mutex borrowing; // threads of several devices share the CPU's
  std::lock_guard<std::recursive_mutex> lock{borrowing};
  at::Generator ours, cpus = at::detail::getDefaultCPUGenerator();
  at::Tensor saved = cpus.get_state();

  explicit BorrowDefaultGenerator(const at::Generator& ours) : ours(ours) {
    cpus.set_state(ours.get_state());
  }
  ~BorrowDefaultGenerator() {
    ours.set_state(cpus.get_state());
    cpus.set_state(saved);
  }
};

void check_device(const at::Tensor& tensor, at::Device device, const std::string& op, const std::string& argument) {
  TORCH_CHECK(
      tensor.device() == device || (tensor.is_cpu() && tensor.dim() == 0),
      "Expected all tensors to be on the same device, but argument '", argument, "' of ", op, " is on ", tensor.device(),
      " and another is on ", device);
}

} // namespace

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto arguments = torch::jit::last(*stack, schema.arguments().size());
  const auto first = stack->size() - arguments.size();
  const auto device = device_among(arguments);
  TORCH_CHECK(device, schema.name(), ": no argument is on a simulated device");
  const c10::DeviceGuard guard(*device);
  const int stream = current_stream(guard.current_device().index());
  const bool view = is_view(schema);
  const bool synchronizing = synchronizes(op, arguments);
  const bool seeded = op.hasTag(at::Tag::nondeterministic_seeded);
  std::optional<BorrowDefaultGenerator> borrowed;

  const bool item = schema.name() == "aten::_local_scalar_dense"; // a copy of one number
  const bool recorded = !view && is_capturing(stream);
  std::vector<c10::IValue> given;
  for (size_t i = 0; recorded && i < arguments.size(); i++)
    given.push_back(with_tensors(arguments[i], [&](const at::Tensor& tensor) {
      if (tensor.defined() && !tensor.is_sparse() && is_written(schema.arguments()[i]))
        keep_contents(tensor);
      return tensor.defined() && tensor.is_cpu() ? tensor.detach().clone() : without_autograd(tensor); // a launch has its numbers
    }));

  Launch launch(schema.name(), stream, !view && !item);
  const size_t item_bytes = item ? arguments[0].toTensor().element_size() : 0;
  Translation translation;
  std::vector<c10::IValue> translated;
  bool has_generator = false, is_sparse = false;
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto& argument = schema.arguments()[i];
    const bool is_generator = argument.type()->isSubtypeOf(*GENERATOR);
    has_generator |= is_generator;
    if (is_generator)
      translated.emplace_back(cpu_generator(arguments[i].toOptional<at::Generator>(), *device));
    else if (arguments[i].isDevice())
      translated.emplace_back(c10::Device(at::kCPU));
    else
      translated.push_back(with_tensors(arguments[i], [&](at::Tensor tensor) {
        if (!tensor.defined())
          return tensor;
        if (tensor.is_cpu() && tensor.dim() > 0 && arguments[i].isOptionalTensorList())
          tensor = tensor.to(*device); // indices may come from the host, as CUDA allows
        check_device(tensor, *device, schema.name(), argument.name());
        is_sparse |= tensor.is_sparse();
        if (!view && tensor.is_sparse()) {
          launch.access(tensor._indices(), false, argument.name());
          launch.access(tensor._values(), is_written(argument), argument.name());
        } else if (!view) {
          launch.access(tensor, is_written(argument), argument.name());
        }
        return translation.to_cpu(tensor);
      }));
  }
  launch.start();
  if (seeded && !has_generator)
    borrowed.emplace(cpu_generator(std::nullopt, *device));
  for (size_t i = 0; i < translated.size(); i++)
    (*stack)[first + i] = translated[i];
  {
    at::AutoDispatchBelowADInplaceOrView below;
    if (is_sparse)
      op.callBoxed(stack);
    else
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  if (item)
    count_copy("device to host", item_bytes, launch.place());
  if (synchronizing)
    synchronize_stream(stream, schema.name(), item ? "item" : "result");
  translation.write_back();
  for (auto& result : torch::jit::last(*stack, schema.returns().size()))
    const_cast<c10::IValue&>(result) =
        with_tensors(result, [&](const at::Tensor& cpu) { return translation.to_device(cpu, *device, launch); });
  if (recorded)
    add_node([op, given, results = translation.made] {
      auto arguments = given;
      reused = &results;
      fallback(op, &arguments);
      reused = nullptr;
    });
}

namespace {

// --- Copies

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  const bool from_device = self.device().type() == SIM, to_device = to.device().type() == SIM;
  const int stream = current_stream((from_device ? self : to).device().index());
  const bool peers = from_device && to_device && self.device() != to.device();
  if (peers) { // as CUDA's copies do: the stream of the source waits for the destination's, which waits for the copy
    Event ready;
    record(ready, current_stream(to.device().index()));
    wait(stream, ready);
  }
  Launch launch("aten::copy_", stream, from_device && to_device);
  launch.access(self, false, "src");
  launch.access(to, true, "self");
  launch.start();
  if (is_capturing(stream)) {
    keep_contents(to);
    add_node([from = without_autograd(self), to = without_autograd(to), non_blocking] { copy_from(from, to, non_blocking); });
  }
  {
    at::AutoDispatchBelowADInplaceOrView below;
    as_cpu(to).copy_(as_cpu(self));
  }
  if (peers) {
    Event copied;
    record(copied, stream);
    wait(current_stream(to.device().index()), copied);
  }
  if (from_device && to_device) {
    if (peers)
      count_copy("device to device", self.nbytes(), launch.place());
    return to;
  }
  count_copy(from_device ? "device to host" : "host to device", self.nbytes(), launch.place());
  const auto* host = (from_device ? to : self).const_data_ptr();
  if (non_blocking && is_pinned(host)) {
    sim::record_stream(host, stream);
    // From now on this thread's operators of the CPU are checked: the host may touch what is on its way.
    c10::impl::tls_set_dispatch_key_included(c10::DispatchKey::TESTING_ONLY_GenericMode, true);
  } else {
    // torch waits for the stream, unless non_blocking. With that CUDA does so for pageable memory: "if pageable memory
    // must first be staged to pinned memory, the driver may synchronize with the stream", and a copy to pageable memory
    // returns when it is complete (CUDA Runtime API, "API synchronization behavior").
    synchronize_stream(stream, "aten::copy_", is_pinned(host) ? "blocking copy" : from_device ? "copy to pageable memory" : "copy from pageable memory");
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

// The operators of the host on pinned memory.
void check_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::TESTING_ONLY_GenericMode);
  const auto& schema = op.schema();
  const auto arguments = torch::jit::last(*stack, schema.arguments().size());
  std::vector<std::pair<at::Tensor, size_t>> pinned;
  for (size_t i = 0; i < arguments.size(); i++)
    for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.has_storage() &&
          is_pinned(tensor.const_data_ptr()))
        pinned.emplace_back(tensor, i);
    });
  const bool shapes_only = schema.name().find("_like") != std::string::npos || schema.name().find("::new_") != std::string::npos;
  if (!pinned.empty() && !is_view(schema) && !shapes_only && !device_among(arguments)) {
    Launch launch(schema.name(), HOST);
    for (const auto& [tensor, i] : pinned)
      launch.access(tensor, is_written(schema.arguments()[i]), schema.arguments()[i].name());
    launch.start();
  }
  op.callBoxed(stack);
}

// --- What the fallback cannot do

void record_tensor_stream(at::Tensor& self, c10::Stream stream) {
  sim::record_stream(self.storage().data(), stream_number(stream));
}

at::Tensor& set_storage_and_offset(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  std::vector<int64_t> strides = stride.vec();
  if (strides.size() != size.size()) {
    strides.assign(size.size(), 1);
    for (int64_t i = int64_t(size.size()) - 2; i >= 0; i--)
      strides[i] = strides[i + 1] * std::max<int64_t>(size[i + 1], 1);
  }
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, strides, offset);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto elements = int64_t(source.nbytes() / self.element_size());
  return set_storage_and_offset(self, std::move(source), 0, {elements}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_and_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Sparse tensors have indices and values that are dense.
TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("_sparse_coo_tensor_with_dims", at::native::new_with_dims_sparse);
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", at::native::new_with_dims_and_tensor_sparse_symint);
  m.impl("empty.memory_format", at::native::empty_sparse);
  m.impl("copy_", at::native::copy_sparse_wrapper_);
  m.impl("copy_sparse_to_sparse_", at::native::copy_sparse_);
  m.impl("clone", at::native::clone_sparse);
  m.impl("zero_", at::native::zero_sparse_);
  m.impl("sparse_resize_and_clear_", at::native::sparse_resize_and_clear_);
  m.impl("_indices", at::native::_indices_sparse);
  m.impl("_values", at::native::_values_sparse);
  m.impl("indices", at::native::indices_sparse);
  m.impl("values", at::native::values_sparse);
  m.impl("_nnz", at::native::_nnz_sparse);
  m.impl("sparse_dim", at::native::sparse_dim_sparse);
  m.impl("dense_dim", at::native::dense_dim_sparse);
  m.impl("_dimI", at::native::sparse_dim_sparse);
  m.impl("_dimV", at::native::dense_dim_sparse);
  m.impl("is_coalesced", at::native::is_coalesced_sparse);
  m.impl("_coalesced_", at::native::_coalesced_sparse_);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&check_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("record_stream", record_tensor_stream);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_and_offset);
  // torch has kernels for every device that would take these apart, or that look for one of the device.
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames()) {
    const bool whole = op.name == "aten::convolution" || op.name == "aten::convolution_backward";
    if (whole || op.name.rfind("aten::_foreach_", 0) == 0)
      m.impl(toString(op).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

} // namespace

} // namespace sim
