// The c10d backend `simccl` of the simulated accelerator. Gloo moves the bytes; the rest is as NCCL does it: a collective
// runs later, on a stream of its own that waits for the caller's, and wait() has the caller's stream wait, not the host.
#include "runtime.h"

#include <ATen/ATen.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <condition_variable>
#include <deque>
#include <thread>
#include <unistd.h>

namespace sim {

at::Tensor as_cpu(const at::Tensor& tensor);

namespace {

using Tensors = std::vector<at::Tensor>;
using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// A stream whose work another thread does, in order.
class Line {
 public:
  explicit Line(int device) : stream(new_stream(device)), thread_([this] { run(); }) {}
  ~Line() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_one();
    getpid() == owner_ ? thread_.join() : thread_.detach(); // a fork has no such thread
  }
  Pending submit(std::function<void()> work) {
    std::packaged_task<TimePoint()> task([work = std::move(work)]() mutable {
      work();
      work = nullptr; // what it holds; the task itself lives as long as somebody knows of its future
      return std::chrono::steady_clock::now();
    });
    auto result = task.get_future().share();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(task));
    }
    changed_.notify_one();
    return result;
  }
  const int stream;

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty())
        return;
      {
        auto task = std::move(queue_.front());
        queue_.pop_front();
        lock.unlock();
        task();
      } // its tensors are given up here, without the lock
      lock.lock();
    }
  }

  const pid_t owner_ = getpid();
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::deque<std::packaged_task<TimePoint()>> queue_;
  std::thread thread_;
};

class SimWork final : public c10d::Work {
 public:
  SimWork(int rank, OpType type, at::Device device, int stream, Tensors outputs, Tensors tensors)
      : Work(rank, type), device_(device), stream_(stream), outputs_(std::move(outputs)), tensors_(std::move(tensors)) {
    record(done_, stream);
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
    const c10::StreamGuard guard(c10::Stream(c10::Stream::UNSAFE, device, stream));
    future_->markCompleted(c10::IValue(outputs_));
  }
  ~SimWork() override { // nobody waited: the tensors live until the stream is done, as with NCCL
    for (const auto& tensor : tensors_)
      record_stream(tensor.storage().data(), stream_);
  }
  bool isCompleted() override {
    return is_done(done_);
  }
  bool isSuccess() const override {
    return true; // an error comes up at the next operator, or synchronization, that waits for this
  }
  bool wait(std::chrono::milliseconds) override {
    sim::wait(current_stream(device_.index()), done_);
    tensors_.clear();
    if (retrieveOpType() == OpType::BARRIER)
      synchronize_stream(stream_, "barrier");
    return true;
  }
  void synchronize() override {
    wait(kNoTimeout);
  }
  std::vector<at::Tensor> result() override {
    return outputs_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  const at::Device device_;
  const int stream_;
  Tensors outputs_, tensors_;
  Event done_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

Tensors flat(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const auto& list : lists)
    all.insert(all.end(), list.begin(), list.end());
  return all;
}

class SimBackend final : public c10d::Backend {
 public:
  using Run = std::function<void(Tensors& inputs, Tensors& outputs)>; // as tensors of the CPU

  explicit SimBackend(c10::intrusive_ptr<c10d::Backend> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override {
    return "simccl";
  }
  void abort() override {
    gloo_->abort();
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return launched_;
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    auto run = [this, opts](Tensors& in, Tensors& out) { gloo_->broadcast(in.empty() ? out : in, opts)->wait(); };
    return rank_ == opts.rootRank ? launch(OpType::BROADCAST, tensors, {}, run) : launch(OpType::BROADCAST, {}, tensors, run);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return launch(OpType::ALLREDUCE, {}, tensors, [this, opts](Tensors&, Tensors& out) { all_reduce(out[0], opts.reduceOp); });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return launch(OpType::ALLREDUCE_COALESCED, {}, tensors, [this, opts](Tensors&, Tensors& out) {
      for (auto& tensor : out)
        all_reduce(tensor, opts.reduceOp);
    });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    const bool root = rank_ == opts.rootRank;
    return launch(OpType::REDUCE, root ? Tensors() : tensors, root ? tensors : Tensors(), [=, this](Tensors& in, Tensors& out) {
      auto sum = root ? out[0] : in[0].clone();
      all_reduce(sum, opts.reduceOp);
    });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return launch(OpType::ALLGATHER, inputs, outputs[0], [this, opts](Tensors& in, Tensors& out) {
      std::vector<Tensors> lists{out};
      gloo_->allgather(lists, in, opts)->wait();
    });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    return launch(OpType::_ALLGATHER_BASE, {input}, {output}, [=, this](Tensors& in, Tensors& out) { all_gather(in[0], out[0], opts); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return launch(OpType::ALLGATHER_COALESCED, inputs, outputs, [=, this](Tensors& in, Tensors& out) {
      for (size_t i = 0; i < in.size(); i++)
        all_gather(in[i], out[i], opts);
    });
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    return launch(OpType::GATHER, inputs, flat(outputs), [=, this](Tensors& in, Tensors& out) {
      auto lists = rank_ == opts.rootRank ? std::vector<Tensors>{out} : std::vector<Tensors>();
      gloo_->gather(lists, in, opts)->wait();
    });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    return launch(OpType::SCATTER, flat(inputs), outputs, [=, this](Tensors& in, Tensors& out) {
      auto lists = rank_ == opts.rootRank ? std::vector<Tensors>{in} : std::vector<Tensors>();
      gloo_->scatter(out, lists, opts)->wait();
    });
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override {
    return launch(OpType::REDUCE_SCATTER, inputs[0], outputs, [=, this](Tensors& in, Tensors& out) {
      for (int rank = 0; rank < size_; rank++) {
        auto sum = in[rank].clone();
        all_reduce(sum, opts.reduceOp);
        if (rank == rank_)
          out[0].copy_(sum);
      }
    });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    return launch(OpType::_REDUCE_SCATTER_BASE, {input}, {output}, [=, this](Tensors& in, Tensors& out) { reduce_scatter(in[0], out[0], opts); });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    return launch(OpType::COALESCED, inputs, outputs, [=, this](Tensors& in, Tensors& out) {
      for (size_t i = 0; i < in.size(); i++)
        reduce_scatter(in[i], out[i], opts);
    });
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& to, std::vector<int64_t>& from,
      const c10d::AllToAllOptions& opts) override {
    return launch(OpType::ALLTOALL_BASE, {input}, {output}, [=, this](Tensors& in, Tensors& out) mutable {
      gloo_->alltoall_base(out[0], in[0], to, from, opts)->wait();
    });
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return launch(OpType::SEND, tensors, {}, [=, this](Tensors& in, Tensors&) { gloo_->send(in, to, tag)->wait(); });
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return launch(OpType::RECV, {}, tensors, [=, this](Tensors&, Tensors& out) { gloo_->recv(out, from, tag)->wait(); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    auto device = opts.device ? *opts.device : at::Device(SIM, opts.device_ids.empty() ? -1 : opts.device_ids[0]);
    return launch(OpType::BARRIER, {}, {at::zeros(1, device)}, [this](Tensors&, Tensors& out) { all_reduce(out[0], c10d::ReduceOp::SUM); });
  }

 private:
  void all_reduce(at::Tensor tensor, c10d::ReduceOp how) {
    c10d::AllreduceOptions opts;
    const bool mean = how == c10d::ReduceOp::AVG;
    opts.reduceOp = mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : how;
    Tensors all{tensor};
    gloo_->allreduce(all, opts)->wait();
    if (mean)
      tensor.div_(size_);
  }
  void all_gather(at::Tensor& in, at::Tensor& out, const c10d::AllgatherOptions& opts) {
    Tensors ins{in};
    std::vector<Tensors> outs{out.view(-1).chunk(size_)};
    for (auto& part : outs[0])
      part = part.view(in.sizes());
    gloo_->allgather(outs, ins, opts)->wait();
  }
  void reduce_scatter(at::Tensor& in, at::Tensor& out, const c10d::ReduceScatterOptions& opts) {
    auto sum = in.clone();
    all_reduce(sum, opts.reduceOp);
    out.view(-1).copy_(sum.view(-1).chunk(size_)[rank_]);
  }

  // Sends and receives have lines of their own, so that two ranks can send to each other.
  WorkPtr launch(OpType type, const Tensors& inputs, const Tensors& outputs, Run run) {
    TORCH_CHECK(!inputs.empty() || !outputs.empty(), "simccl: no tensor was given");
    Tensors all = inputs, cpu_inputs, cpu_outputs;
    all.insert(all.end(), outputs.begin(), outputs.end());
    const auto device = all[0].device();
    for (const auto& tensor : all)
      TORCH_CHECK(tensor.device() == device && device.type() == SIM, "simccl: tensors of one simulated device, not of ", device, " and ", tensor.device());
    auto& line = line_of(device.index(), type == OpType::SEND || type == OpType::RECV ? int(type) : 0);
    Event ready;
    record(ready, current_stream(device.index()));
    wait(line.stream, ready);

    Launch launch("simccl " + c10d::opTypeToString(type), line.stream, false);
    for (const auto& tensor : inputs)
      launch.access(tensor, false, "input"), cpu_inputs.push_back(as_cpu(tensor));
    for (const auto& tensor : outputs)
      launch.access(tensor, true, "output"), cpu_outputs.push_back(as_cpu(tensor));
    const auto before = launch.start_later();
    launched_++;
    count_collective();
    set_pending(line.stream, line.submit([=]() mutable {
      for (const auto& pending : before)
        pending.get();
      run(cpu_inputs, cpu_outputs);
    }));
    return c10::make_intrusive<SimWork>(rank_, type, device, line.stream, outputs, all);
  }

  Line& line_of(int device, int kind) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& line = lines_[{device, kind}];
    if (!line)
      line = std::make_unique<Line>(device);
    return *line;
  }

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  std::mutex mutex_;
  std::map<std::pair<int, int>, std::unique_ptr<Line>> lines_;
  uint64_t launched_ = 0;
};

} // namespace

// --- For Python: here, as this file includes most of torch anyway

std::string current_autograd_node() {
  const auto node = torch::autograd::get_current_node();
  return node ? node->name() : "";
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  using namespace py::literals;
  install();
  m.attr("device_type") = int(SIM);
  m.def("device_count", &device_count);
  m.def("set_device_count", &set_device_count);
  m.def("set_memory_limit", &set_memory_limit);
  m.def("set_float64", &set_float64);
  m.def("take_errors", &take_errors);
  m.def("set_check", [](const std::string& mode) {
    const std::map<std::string, Check> modes{{"off", Check::OFF}, {"collect", Check::COLLECT}, {"raise", Check::RAISE}};
    TORCH_CHECK_VALUE(modes.count(mode), "check: 'off', 'collect' or 'raise', not '", mode, "'");
    set_check(modes.at(mode));
  });
  m.def("default_generator", [](int device) {
    const auto& generator = at::detail::getPrivateUse1Hooks().getDefaultGenerator(device);
    return py::reinterpret_steal<py::object>(THPGenerator_initDefaultGenerator(generator));
  });
  m.def("take_counters", [] {
    const auto taken = take_counters();
    py::list places;
    for (const auto& [kind, place] : taken.places)
      places.append(py::make_tuple(kind, describe(place)));
    return py::dict(
        "synchronizations"_a = taken.synchronizations, "event_waits"_a = taken.event_waits, "kernels"_a = taken.kernels, "collectives"_a = taken.collectives,
        "host_to_device_bytes"_a = taken.host_to_device_bytes, "device_to_host_bytes"_a = taken.device_to_host_bytes,
        "device_to_device_bytes"_a = taken.device_to_device_bytes, "allocations"_a = taken.allocations,
        "segments"_a = taken.segments, "kernels_by_stream"_a = taken.kernels_by_stream, "places"_a = places);
  });
  m.def("make_backend", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<SimBackend>(std::move(gloo));
  });
}

} // namespace sim
