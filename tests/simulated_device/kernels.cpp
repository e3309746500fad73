// Kernels that CUDA has and torch's generic code asks for: recurrent networks, as cuDNN runs them, and fused attention.
#include "runtime.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>

namespace sim {

at::Tensor as_cpu(const at::Tensor& tensor);
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

namespace {

using OptionalTensor = std::optional<at::Tensor>;

// --- Recurrent networks

// cuDNN keeps the state of an RNN's dropout, one for each device, and torch makes it anew in the first forward after the
// generator of the device was seeded. The new seed is read by the host, with `random_(gen).item<int64_t>()`
// (get_dropout_state() in aten/src/ATen/native/cudnn/RNN.cpp, CUDAGeneratorImpl::reset_rnn_state()). The numbers here are
// those of the generator itself, so that nothing is drawn for the seed.
void init_dropout_state(at::Device device) {
  if (!take_reset_rnn_state(device.index()))
    return;
  const int stream = current_stream(device.index());
  at::zeros({}, at::TensorOptions().dtype(at::kLong).device(device)).item<int64_t>();
  Launch("aten::_cudnn_init_dropout_state", stream).start();
}

void recurrent(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto given = torch::jit::last(*stack, arguments.size());
  const auto argument = [&](const char* name) { return given[*op.schema().argumentIndexWithName(name)]; };
  const auto device = given[0].toTensor().device();
  if (argument("train").toBool() && argument("dropout").toDouble() > 0)
    init_dropout_state(device);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack); // torch's own loop over cells, with autograd
}

at::Tensor with_biases(const at::Tensor& gates, const OptionalTensor& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

at::Tensor through_sigmoid(const at::Tensor& grad, const at::Tensor& output) {
  return grad * output * (1 - output);
}

at::Tensor through_tanh(const at::Tensor& grad, const at::Tensor& output) {
  return grad * (1 - output * output);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& from_input, const at::Tensor& from_hidden, const at::Tensor& cx, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  const auto gates = (with_biases(from_input, input_bias) + with_biases(from_hidden, hidden_bias)).chunk(4, 1);
  const auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
  const auto cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(
    const OptionalTensor& grad_hy, const OptionalTensor& grad_cy, const at::Tensor& cx, const at::Tensor& cy,
    const at::Tensor& workspace, bool has_bias) {
  const auto gates = workspace.chunk(4, 1);
  const auto in = gates[0], forget = gates[1], cell = gates[2], out = gates[3], outer = cy.tanh();
  const auto of_hy = grad_hy && grad_hy->defined() ? *grad_hy : at::zeros_like(cy);
  auto of_cy = through_tanh(of_hy * out, outer);
  if (grad_cy && grad_cy->defined())
    of_cy = of_cy + *grad_cy;
  const auto of_gates = at::cat(
      {through_sigmoid(of_cy * cell, in), through_sigmoid(of_cy * cx, forget), through_tanh(of_cy * in, cell),
       through_sigmoid(of_hy * outer, out)},
      1);
  return {of_gates, of_cy * forget, has_bias ? of_gates.sum(0) : at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& from_input, const at::Tensor& from_hidden, const at::Tensor& hx, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  const auto input = with_biases(from_input, input_bias).chunk(3, 1);
  const auto hidden = with_biases(from_hidden, hidden_bias).chunk(3, 1);
  const auto reset = (input[0] + hidden[0]).sigmoid(), update = (input[1] + hidden[1]).sigmoid();
  const auto fresh = (input[2] + reset * hidden[2]).tanh();
  return {fresh + update * (hx - fresh), at::cat({reset, update, fresh, hx, hidden[2]}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& grad, const at::Tensor& workspace, bool has_bias) {
  const auto saved = workspace.chunk(5, 1);
  const auto reset = saved[0], update = saved[1], fresh = saved[2], hx = saved[3], hidden = saved[4];
  const auto of_fresh = through_tanh(grad * (1 - update), fresh), of_update = through_sigmoid(grad * (hx - fresh), update);
  const auto of_reset = through_sigmoid(of_fresh * hidden, reset);
  const auto of_input = at::cat({of_reset, of_update, of_fresh}, 1);
  const auto of_hidden = at::cat({of_reset, of_update, of_fresh * reset}, 1);
  return {of_input, of_hidden, grad * update, has_bias ? of_input.sum(0) : at::Tensor(), has_bias ? of_hidden.sum(0) : at::Tensor()};
}

// --- Attention

// Fused kernels split the keys into blocks, and add to the gradient of a query what each block gives as it is done, unless
// they are asked for an order: flash attention by its argument `deterministic`, memory-efficient attention by
// `num_splits_key = 1`. Both are so under torch.use_deterministic_algorithms(True), and not with warn_only=True, which only
// warns once; cuDNN's kernel cannot be asked, and is then not chosen (check_cudnn_deterministic() in
// aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, and attention_backward.cu). With one block there is one order.
constexpr int64_t BLOCK_OF_KEYS = 128;

bool is_deterministic() {
  return at::globalContext().deterministicAlgorithms() && !at::globalContext().deterministicAlgorithmsWarnOnly();
}

void warn_of_attention(const char* kernel) {
  if (at::globalContext().deterministicAlgorithms() && !is_deterministic())
    TORCH_WARN(
        kernel, " defaults to a non-deterministic algorithm. ",
        "To explicitly enable determinism call torch.use_deterministic_algorithms(True, warn_only=False).");
}

// Changes the last bit of some numbers, each time of others.
void add_in_another_order(const at::Tensor& grad) {
  static std::atomic<int64_t> calls = 0;
  const auto cpu = as_cpu(grad);
  const int64_t every = 7, size = grad.element_size();
  auto* bytes = static_cast<char*>(cpu.mutable_data_ptr());
  const auto elements = int64_t(at::detail::computeStorageNbytes(cpu.sizes(), cpu.strides(), size)) / size;
  for (int64_t i = calls++ % every; i < elements; i += every)
    bytes[i * size] ^= 1; // little-endian
}

const c10::OperatorHandle& operator_of(const char* name) {
  static std::map<std::string, c10::OperatorHandle> found;
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  return found.try_emplace(name, c10::Dispatcher::singleton().findSchemaOrThrow(name, "")).first->second;
}

constexpr auto FORWARD = "aten::_scaled_dot_product_flash_attention_for_cpu";
constexpr auto BACKWARD = "aten::_scaled_dot_product_flash_attention_for_cpu_backward";

struct Attention {
  at::Tensor out, logsumexp;
};

Attention attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double dropout, bool is_causal,
    const OptionalTensor& mask, std::optional<double> scale) {
  torch::jit::Stack stack{query, key, value, dropout, is_causal, mask, scale};
  fallback(operator_of(FORWARD), &stack);
  return {stack[0].toTensor(), stack[1].toTensor()};
}

std::vector<at::Tensor> attention_backward(
    const char* kernel, const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& out, const at::Tensor& logsumexp, double dropout, bool is_causal, const OptionalTensor& mask,
    std::optional<double> scale) {
  warn_of_attention(kernel);
  const auto given = mask && mask->defined() ? mask : std::nullopt;
  torch::jit::Stack stack{grad, query, key, value, out, logsumexp, dropout, is_causal, given, scale};
  fallback(operator_of(BACKWARD), &stack);
  if (!is_deterministic() && key.size(2) > BLOCK_OF_KEYS)
    add_in_another_order(stack[0].toTensor());
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor()};
}

at::Tensor no_seed(const at::Tensor& query) {
  return at::empty({0}, query.options().dtype(at::kLong));
}

// torch calls this one of the CPU where flash attention was chosen, unless on CUDA.
std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& out,
    const at::Tensor& logsumexp, double dropout, bool is_causal, const OptionalTensor& mask, std::optional<double> scale) {
  const auto grads = attention_backward("Flash Attention", grad, query, key, value, out, logsumexp, dropout, is_causal, mask, scale);
  return {grads[0], grads[1], grads[2]};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const OptionalTensor& bias, bool, double dropout,
    bool is_causal, std::optional<double> scale) {
  const auto [out, logsumexp] = attention(query, key, value, dropout, is_causal, bias, scale);
  return {out, logsumexp, no_seed(query), no_seed(query)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient_backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& bias,
    const at::Tensor& out, const at::Tensor& logsumexp, const at::Tensor&, const at::Tensor&, double dropout,
    std::array<bool, 4>, bool is_causal, std::optional<double> scale) {
  if (!grad.defined())
    return {};
  const auto grads = attention_backward(
      "Memory Efficient attention", grad, query, key, value, out, logsumexp, dropout, is_causal, bias, scale);
  return {grads[0], grads[1], grads[2], at::Tensor()};
}

using Cudnn = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor>;

Cudnn cudnn(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const OptionalTensor& bias, bool, double dropout,
    bool is_causal, bool, std::optional<double> scale) {
  const auto [out, logsumexp] = attention(query, key, value, dropout, is_causal, bias, scale);
  return {out, logsumexp, at::Tensor(), at::Tensor(), query.size(2), key.size(2), no_seed(query), no_seed(query), at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> cudnn_backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& out,
    const at::Tensor& logsumexp, const at::Tensor&, const at::Tensor&, const at::Tensor& bias, const at::Tensor&,
    const at::Tensor&, c10::SymInt, c10::SymInt, double dropout, bool is_causal, std::optional<double> scale) {
  const auto grads = attention_backward("cuDNN Attention", grad, query, key, value, out, logsumexp, dropout, is_causal, bias, scale);
  return {grads[0], grads[1], grads[2]};
}

bool can_use(at::SDPBackend backend, const at::Tensor& query, bool has_mask) {
  const auto& context = at::globalContext();
  const auto dtype = query.scalar_type();
  const bool is_half = dtype == at::kHalf || dtype == at::kBFloat16;
  switch (backend) {
    case at::SDPBackend::flash_attention:
      return context.userEnabledFlashSDP() && is_half && !has_mask;
    case at::SDPBackend::efficient_attention:
      return context.userEnabledMemEfficientSDP() && (is_half || dtype == at::kFloat);
    case at::SDPBackend::cudnn_attention:
      return context.userEnabledCuDNNSDP() && is_half && !is_deterministic();
    case at::SDPBackend::math:
      return context.userEnabledMathSDP();
    default:
      return false;
  }
}

// The first of torch's order that can be used, as select_sdp_backend() in sdp_utils.cpp. The kernel of the CPU that does the
// work has no dropout, and no gradient for a mask: those go the way of `math`.
int64_t choose_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const OptionalTensor& mask, double dropout,
    bool, std::optional<double>, bool enable_gqa) {
  const bool has_mask = mask && mask->defined();
  bool fused = dropout == 0 && !enable_gqa && !(has_mask && mask->requires_grad());
  for (const auto* each : {&query, &key, &value})
    fused = fused && each->dim() == 4 && each->numel() > 0 && each->stride(-1) == 1 && each->size(-1) == query.size(-1) &&
        each->scalar_type() == query.scalar_type() && each->size(0) == query.size(0) && each->size(1) == query.size(1);
  for (const auto backend : at::globalContext().sDPPriorityOrder())
    if ((fused || backend == at::SDPBackend::math) && can_use(backend, query, has_mask))
      return int64_t(backend);
  return int64_t(at::SDPBackend::error);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
  m.impl("_fused_sdp_choice", choose_attention);
  m.impl("_scaled_dot_product_flash_attention_for_cpu_backward", flash_backward);
  m.impl("_scaled_dot_product_efficient_attention", efficient);
  m.impl("_scaled_dot_product_efficient_attention_backward", efficient_backward);
  m.impl("_scaled_dot_product_cudnn_attention", cudnn);
  m.impl("_scaled_dot_product_cudnn_attention_backward", cudnn_backward);
}

void register_recurrent(torch::Library& m) {
  for (const char* name : {"lstm", "gru", "rnn_tanh", "rnn_relu"})
    for (const char* overload : {".input", ".data"})
      m.impl((std::string(name) + overload).c_str(), torch::CppFunction::makeFromBoxedFunction<&recurrent>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  register_recurrent(m); // in inference mode
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  register_recurrent(m);
}

} // namespace

} // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::choose_attention)
} // namespace at::native
