// The c10d backend `simccl` of the simulated accelerator. Gloo moves the bytes; the rest is as ProcessGroupNCCL does it: a
// collective runs later, on a stream of its own that waits for the caller's (or on the caller's, unless async_op), and
// wait() has the caller's stream wait, not the host. Its future is completed when it is enqueued. See [Note: lost peers].
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
#include <iostream>
#include <thread>
#include <unistd.h>

namespace sim {

at::Tensor as_cpu(const at::Tensor& tensor);

namespace {

using Tensors = std::vector<at::Tensor>;
using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Pairs = std::vector<std::pair<at::Tensor, at::Tensor>>; // to, from

const char* SPARSE_ERROR = "NCCL does not support all_reduce with sparse tensors. Please use dense tensors instead.";

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
    const WithoutGil without; // which the thread needs, to give up tensors
    getpid() == owner_ ? thread_.join() : thread_.detach(); // a fork has no such thread
  }
  void submit(std::function<void()> work) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(work));
    }
    changed_.notify_one();
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
        auto work = std::move(queue_.front());
        queue_.pop_front();
        lock.unlock();
        work();
      } // its tensors are given up here, without the lock
      lock.lock();
    }
  }

  const pid_t owner_ = getpid();
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::deque<std::function<void()>> queue_;
  std::thread thread_;
};

// Whether a group is being ended: what is lost ends then, too.
class Ending {
 public:
  void begin() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      begun_ = true;
    }
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return begun_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool begun_ = false;
};

// NCCL has no connection that could break, so nobody gets to know what Gloo says of one. Its other errors are kept.
bool is_of_lost_peer(const std::string& error) {
  for (const char* part : {"onnect", "imed out", "imeout", "by peer", "roken pipe", "ocket", "borted"})
    if (error.find(part) != std::string::npos)
      return true;
  return false;
}

// Of tensors that `allocateTensor` has returned, as NCCL does in memory that it has registered.
std::atomic<size_t> registered_bytes = 0;

// As which backend collectives behave. NCCL: a wait for the future orders streams. NCCL2, of torch 2.15: asking for the
// future makes the current stream wait. GLOO, on a GPU: the future orders no stream, only the work does.
enum class Kind { NCCL, NCCL2, GLOO };
std::atomic<Kind> kind = Kind::NCCL;

class SimWork final : public c10d::Work {
 public:
  SimWork(int rank, OpType type, at::Device device, int stream, bool host_waits, Tensors outputs, Tensors tensors)
      : Work(rank, type), device_(device), stream_(stream), host_waits_(host_waits), outputs_(std::move(outputs)),
        tensors_(std::move(tensors)) {
    record(done_, stream);
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()),
        kind == Kind::GLOO ? std::vector<c10::Device>() : std::vector<c10::Device>{device});
    if (kind == Kind::GLOO) {
      future_->markCompleted(c10::IValue());
      return;
    }
    const c10::StreamGuard guard(c10::Stream(c10::Stream::UNSAFE, device, stream <= MAX_DEVICES ? 0 : stream));
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
  bool wait(std::chrono::milliseconds timeout) override {
    sim::wait(current_stream(device_.index()), done_);
    tensors_.clear();
    if (timeout != kNoTimeout) {
      const auto end = std::chrono::steady_clock::now() + timeout;
      while (!isCompleted()) {
        TORCH_CHECK_WITH(
            DistBackendError, std::chrono::steady_clock::now() < end, "simccl: ", c10d::opTypeToString(retrieveOpType()),
            " timed out in blocking wait.");
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      synchronize_event(done_, "Work.wait");
    } else if (host_waits_) {
      synchronize_stream(current_stream(device_.index()), "barrier", "barrier");
    }
    return true;
  }
  void synchronize() override {
    wait(kNoTimeout);
  }
  std::vector<at::Tensor> result() override {
    return outputs_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (kind == Kind::NCCL2)
      sim::wait(current_stream(device_.index()), done_);
    return future_;
  }

 private:
  const at::Device device_;
  const int stream_;
  const bool host_waits_;
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
    return kind == Kind::GLOO ? "gloo" : "simccl";
  }
  ~SimBackend() override {
    ending_->begin();
  }
  void abort() override {
    ending_->begin();
    gloo_->abort();
  }
  void shutdown() override {
    ending_->begin();
  }
  // Of the ranks whose groups exist, all must come. Nobody gets to know if one is lost; see [Note: lost peers].
  void eagerConnectSingleDevice(at::Device) override {
    try {
      c10d::BarrierOptions opts;
      opts.timeout = std::chrono::minutes(10);
      gloo_->barrier(opts)->wait();
    } catch (const std::exception& caught) {
      TORCH_CHECK(is_of_lost_peer(caught.what()), caught.what());
      ending_->wait();
    }
  }
  bool supportsTensorAlloc(c10::DeviceIndex) override {
    return true;
  }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    registered_bytes += size * options.dtype().itemsize();
    return at::empty({size}, options);
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return launched_;
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    const bool root = rank_ == opts.rootRank;
    auto run = [this, opts](Tensors& in, Tensors& out) { gloo_->broadcast(in.empty() ? out : in, opts)->wait(); };
    return launch({OpType::BROADCAST, root ? tensors : Tensors(), root ? Tensors() : tensors, run, opts.asyncOp, tensors});
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    auto run = [this, opts](Tensors&, Tensors& out) { all_reduce(out[0], opts.reduceOp); };
    return launch({OpType::ALLREDUCE, {}, tensors, run, opts.asyncOp});
  }
  WorkPtr allreduce_sparse(Tensors&, const c10d::AllreduceOptions&) override {
    refuse_sparse();
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    auto run = [this, opts](Tensors&, Tensors& out) {
      for (auto& tensor : out)
        all_reduce(tensor, opts.reduceOp);
    };
    return launch({OpType::ALLREDUCE_COALESCED, {}, tensors, run, opts.asyncOp});
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    const bool root = rank_ == opts.rootRank;
    auto run = [=, this](Tensors& in, Tensors& out) {
      auto sum = root ? out[0] : in[0].clone();
      all_reduce(sum, opts.reduceOp);
    };
    return launch({OpType::REDUCE, root ? Tensors() : tensors, root ? tensors : Tensors(), run, opts.asyncOp, tensors});
  }
  // Into one tensor, then a copy for each rank. That tensor is the result that the future has.
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    auto& parts = outputs[0];
    if (!have_one_shape(parts)) { // NCCL sends them one by one, without copies
      auto run = [this](Tensors& in, Tensors& out) {
        out[rank_].copy_(in[0]);
        for (int rank = 0; rank < size_; rank++) {
          Tensors part{out[rank]};
          c10d::BroadcastOptions from;
          from.rootRank = rank;
          gloo_->broadcast(part, from)->wait();
        }
      };
      return launch({OpType::ALLGATHER, inputs, parts, run, opts.asyncOp});
    }
    auto all = stacked(parts);
    auto run = [=, this](Tensors& in, Tensors& out) { all_gather(in[0], out[0], opts); };
    return launch({OpType::ALLGATHER, inputs, {all}, run, opts.asyncOp, {}, {}, pairs(parts, all.unbind())});
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    auto run = [=, this](Tensors& in, Tensors& out) { all_gather(in[0], out[0], opts); };
    return launch({OpType::_ALLGATHER_BASE, {input}, {output}, run, opts.asyncOp});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    auto run = [=, this](Tensors& in, Tensors& out) {
      for (size_t i = 0; i < in.size(); i++)
        all_gather(in[i], out[i], opts);
    };
    return launch({OpType::ALLGATHER_COALESCED, inputs, outputs, run, opts.asyncOp});
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    auto run = [=, this](Tensors& in, Tensors& out) {
      auto lists = rank_ == opts.rootRank ? std::vector<Tensors>{out} : std::vector<Tensors>();
      gloo_->gather(lists, in, opts)->wait();
    };
    return launch({OpType::GATHER, inputs, flat(outputs), run, opts.asyncOp});
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    auto run = [=, this](Tensors& in, Tensors& out) {
      auto lists = rank_ == opts.rootRank ? std::vector<Tensors>{in} : std::vector<Tensors>();
      gloo_->scatter(out, lists, opts)->wait();
    };
    return launch({OpType::SCATTER, flat(inputs), outputs, run, opts.asyncOp});
  }
  // A copy for each rank, then from one tensor.
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override {
    auto& parts = inputs[0];
    if (!have_one_shape(parts)) {
      auto run = [=, this](Tensors& in, Tensors& out) {
        for (int rank = 0; rank < size_; rank++) {
          auto sum = in[rank].clone();
          all_reduce(sum, opts.reduceOp);
          if (rank == rank_)
            out[0].copy_(sum);
        }
      };
      return launch({OpType::REDUCE_SCATTER, parts, outputs, run, opts.asyncOp});
    }
    auto all = stacked(parts);
    auto run = [=, this](Tensors& in, Tensors& out) { reduce_scatter(in[0], out[0], opts); };
    return launch({OpType::REDUCE_SCATTER, {all}, outputs, run, opts.asyncOp, {}, pairs(all.unbind(), parts)});
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    auto run = [=, this](Tensors& in, Tensors& out) { reduce_scatter(in[0], out[0], opts); };
    return launch({OpType::_REDUCE_SCATTER_BASE, {input}, {output}, run, opts.asyncOp});
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    auto run = [=, this](Tensors& in, Tensors& out) {
      for (size_t i = 0; i < in.size(); i++)
        reduce_scatter(in[i], out[i], opts);
    };
    return launch({OpType::COALESCED, inputs, outputs, run, opts.asyncOp});
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& to, std::vector<int64_t>& from,
      const c10d::AllToAllOptions& opts) override {
    auto run = [=, this](Tensors& in, Tensors& out) mutable { gloo_->alltoall_base(out[0], in[0], to, from, opts)->wait(); };
    return launch({OpType::ALLTOALL_BASE, {input}, {output}, run, opts.asyncOp});
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return launch({OpType::SEND, tensors, {}, [=, this](Tensors& in, Tensors&) { gloo_->send(in, to, tag)->wait(); }});
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return launch({OpType::RECV, {}, tensors, [=, this](Tensors&, Tensors& out) { gloo_->recv(out, from, tag)->wait(); }});
  }
  // The only one for which the host waits: for the stream that is current.
  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    int index = opts.device ? opts.device->index() : opts.device_ids.empty() ? -1 : opts.device_ids[0];
    if (index < 0)
      index = lines_.empty() ? rank_ % device_count() : lines_.begin()->first.first;
    auto run = [this](Tensors&, Tensors& out) { all_reduce(out[0], c10d::ReduceOp::SUM); };
    auto work = launch({OpType::BARRIER, {}, {at::zeros(1, at::Device(SIM, index))}, run, opts.asyncOp});
    if (!opts.asyncOp)
      synchronize_stream(current_stream(index), "barrier", "barrier");
    return work;
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

  [[noreturn]] static void refuse_sparse() {
    TORCH_CHECK(false, SPARSE_ERROR);
  }
  static bool have_one_shape(const Tensors& tensors) {
    for (const auto& tensor : tensors)
      if (tensor.sizes() != tensors[0].sizes())
        return false;
    return true;
  }
  static at::Tensor stacked(const Tensors& tensors) { // with room for all
    auto sizes = tensors[0].sizes().vec();
    sizes.insert(sizes.begin(), int64_t(tensors.size()));
    return at::empty(sizes, tensors[0].options());
  }
  static Pairs pairs(const Tensors& to, const Tensors& from) {
    Pairs all;
    for (size_t i = 0; i < to.size(); i++)
      all.emplace_back(to[i], from[i]);
    return all;
  }

  struct Collective {
    OpType type;
    Tensors inputs, outputs;
    Run run;
    bool is_async = true;
    Tensors results = {}; // if not the outputs
    Pairs copies_before = {}, copies_after = {}; // a kernel each
  };

  // Sends and receives have lines of their own, so that two ranks can send to each other. All others are chained, as they
  // share one group of Gloo, which takes them for what it is given in the same order on all ranks.
  WorkPtr launch(Collective given) {
    const auto& [type, inputs, outputs, run, is_async, results, copies_before, copies_after] = given;
    TORCH_CHECK(!inputs.empty() || !outputs.empty(), "simccl: no tensor was given");
    Tensors all = inputs, cpu_inputs, cpu_outputs;
    all.insert(all.end(), outputs.begin(), outputs.end());
    const auto device = all[0].device();
    for (const auto& tensor : all) {
      if (tensor.is_sparse())
        refuse_sparse();
      TORCH_CHECK(tensor.device() == device && device.type() == SIM, "simccl: tensors of one simulated device, not of ", device, " and ", tensor.device());
      TORCH_CHECK_VALUE(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
    }
    const bool chained = type != OpType::SEND && type != OpType::RECV;
    auto& line = line_of(device.index(), chained ? 0 : int(type));
    const int current = current_stream(device.index()), stream = is_async ? line.stream : current;
    if (is_async) {
      Event ready;
      record(ready, current);
      wait(stream, ready);
    }

    if (is_capturing(stream)) {
      for (const auto& tensor : outputs)
        keep_contents(tensor);
      for (const auto& copies : {copies_before, copies_after})
        for (const auto& [to, from] : copies)
          keep_contents(to);
      add_node([this, again = given] { launch(again)->wait(); }); // the group outlives its graphs, as NCCL asks for
    }

    const std::lock_guard<std::mutex> in_order(order_);
    std::vector<Pending> before;
    Pairs cpu_before = copy(copies_before, stream, before), cpu_after;
    {
      Launch launch("simccl " + c10d::opTypeToString(type), stream, false);
      for (const auto& tensor : inputs)
        launch.access(tensor, false, "input"), cpu_inputs.push_back(as_cpu(tensor));
      for (const auto& tensor : outputs)
        launch.access(tensor, true, "output"), cpu_outputs.push_back(as_cpu(tensor));
      add(before, launch.start_later());
    }
    cpu_after = copy(copies_after, stream, before);
    if (chained && last_)
      before.push_back(last_);
    launched_++;
    count_collective();
    auto done = std::make_shared<Completion>();
    if (chained)
      last_ = done;
    auto work = [=, run = run]() mutable {
      for (const auto& pending : before)
        pending->wait();
      const Occupation occupation(device.index());
      for (const auto& [to, from] : cpu_before)
        to.copy_(from);
      run(cpu_inputs, cpu_outputs);
      for (const auto& [to, from] : cpu_after)
        to.copy_(from);
    };
    set_pending(stream, done);
    line.submit([done, ending = ending_, rank = rank_, type = type, work = std::function<void()>(std::move(work))]() mutable {
      std::exception_ptr error;
      try {
        work();
      } catch (const std::exception& caught) {
        if (is_of_lost_peer(caught.what())) {
          std::cerr << "simccl: " + c10d::opTypeToString(type) + " of rank " + std::to_string(rank) + " hangs: " + caught.what() + "\n";
          done->lose();
          ending->wait();
        } else {
          error = std::current_exception();
        }
      }
      work = nullptr; // its tensors are given up before anybody knows that it is done
      done->finish(error);
    });
    for (const auto& copies : {copies_before, copies_after})
      for (const auto& [to, from] : copies)
        add(all, {to, from});
    return c10::make_intrusive<SimWork>(
        rank_, type, device, stream, type == OpType::BARRIER && is_async, results.empty() ? outputs : results,
        is_async ? all : Tensors());
  }

  template <typename T>
  static void add(std::vector<T>& to, const std::vector<T>& more) {
    to.insert(to.end(), more.begin(), more.end());
  }

  // Launches copies; the line does them.
  static Pairs copy(const Pairs& tensors, int stream, std::vector<Pending>& before) {
    Pairs cpu;
    for (const auto& [to, from] : tensors) {
      Launch launch("aten::copy_", stream);
      launch.access(from, false, "src");
      launch.access(to, true, "self");
      add(before, launch.start_later());
      cpu.emplace_back(as_cpu(to), as_cpu(from));
    }
    return cpu;
  }

  Line& line_of(int device, int kind) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& line = lines_[{device, kind}];
    if (!line)
      line = std::make_unique<Line>(device);
    return *line;
  }

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  const std::shared_ptr<Ending> ending_ = std::make_shared<Ending>();
  std::mutex mutex_, order_;
  Pending last_; // of those that are chained
  uint64_t launched_ = 0;
  std::map<std::pair<int, int>, std::unique_ptr<Line>> lines_; // last: their threads use the rest
};

// As ProcessGroupNCCL's for sparse tensors of CUDA.
void refuse_sparse_all_reduce(const c10::OperatorHandle&, torch::jit::Stack*) {
  TORCH_CHECK(false, SPARSE_ERROR);
}

TORCH_LIBRARY_IMPL(c10d, SparsePrivateUse1, m) {
  m.impl("allreduce_", torch::CppFunction::makeFromBoxedFunction<&refuse_sparse_all_reduce>());
}

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
  m.def("memory_limit", &memory_limit);
  m.def("set_float64", &set_float64);
  m.def("take_errors", &take_errors);
  m.def("set_patience", &set_patience);
  m.def("contexts", [] {
    py::dict found;
    for (const auto& [device, place] : contexts())
      found[py::int_(device)] = describe(place);
    return found;
  });
  m.def("is_occupied", &is_occupied);
  m.def("forget_contexts", &forget_contexts);
  m.def("begin_capture", [](int device) { begin_capture(current_stream(device)); });
  m.def("end_capture", &end_capture);
  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph").def("replay", &Graph::replay);
  m.def("is_capturing", [](int device) { return is_capturing(current_stream(device)); });
  m.def("set_check", [](const std::string& mode) {
    const std::map<std::string, Check> modes{{"off", Check::OFF}, {"collect", Check::COLLECT}, {"raise", Check::RAISE}};
    TORCH_CHECK_VALUE(modes.count(mode), "check: 'off', 'collect' or 'raise', not '", mode, "'");
    set_check(modes.at(mode));
  });
  m.def("registered_bytes", [] { return registered_bytes.load(); });
  m.def("set_backend_kind", [](const std::string& name) {
    const std::map<std::string, Kind> kinds{{"nccl", Kind::NCCL}, {"nccl2", Kind::NCCL2}, {"gloo", Kind::GLOO}};
    kind = kinds.at(name);
  });
  m.def("default_generator", [](int device) {
    const auto& generator = at::detail::getPrivateUse1Hooks().getDefaultGenerator(device);
    return py::reinterpret_steal<py::object>(THPGenerator_initDefaultGenerator(generator));
  });
  m.def("take_counters", [] {
    const auto taken = take_counters();
    py::list places, waits;
    for (const auto& wait : taken.waits)
      waits.append(py::make_tuple(wait.kind, describe(wait.place), wait.queued, wait.thread));
    for (const auto& [kind, place] : taken.places)
      places.append(py::make_tuple(kind, describe(place)));
    return py::dict(
        "synchronizations"_a = taken.synchronizations, "event_waits"_a = taken.event_waits, "kernels"_a = taken.kernels, "collectives"_a = taken.collectives,
        "slowed_kernels"_a = taken.slowed_kernels, "slowed_s"_a = taken.slowed_s,
        "host_to_device_bytes"_a = taken.host_to_device_bytes, "device_to_host_bytes"_a = taken.device_to_host_bytes,
        "device_to_device_bytes"_a = taken.device_to_device_bytes, "allocations"_a = taken.allocations,
        "segments"_a = taken.segments, "kernels_by_stream"_a = taken.kernels_by_stream, "places"_a = places, "waits"_a = waits);
  });
  m.def("make_backend", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<SimBackend>(std::move(gloo));
  });
}

} // namespace sim
