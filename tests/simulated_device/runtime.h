// The simulated accelerator: what runtime.cpp keeps (memory, streams, events, the check of their order) and what
// operators.cpp and process_group.cpp need of it.
//
// Operators run at once, on the thread that launches them: the boxed fallback learns the shape of a result only by
// computing it. Collectives run later, on a thread of their own. What orders streams on a real device is not left to
// luck: every stream has a vector clock, and an access that no event, wait or synchronization puts after an earlier
// one of another stream is an error each time it happens, also where this run would have read the right numbers.
//
// [Note: current device] A thread has one, 0 at first, and the process a context on each device that it has used. What
// opens one is what does with CUDA 12 and c10/cuda of torch 2.11 to 2.13. The guard of an operator goes back to a device
// without a context in name only (c10::cuda::MaybeSetDevice). Event.record(), wait() and elapsed_time(), the release of
// an event and synchronize() of a device really go back, which opens a context there, and Event.query() and
// synchronize() use the current device whatever the event's: in a thread that never set its device that is device 0.
//
// [Note: lost peers] A collective whose peer is gone never ends, as with NCCL, which has no connection that would break:
// its events stay pending, and who waits for it on the host waits until the group is aborted. Only operators go on, with
// the numbers as they are: on a real device they would be queued, and the host would reach its next wait.
//
// [Note: graphs] While a graph is captured, operators run, as the shape of a result is not known otherwise, and are recorded.
// At the end the memory that they wrote in has its contents again, so that nothing has happened. A replay runs them again,
// one after the other on the stream that is current, in the memory of the capture, which the graph keeps. Not simulated:
// the capture draws random numbers.
//
// [Note: multiprocessors] NCCL's kernel of a collective occupies a multiprocessor for each of its channels, at most 32
// (NCCL_MAX_NCHANNELS, NCCL_MAX_CTAS), from when its inputs are there until its peers are done; an H100 has 132. An operator
// that runs meanwhile has the rest, and takes longer in proportion: Counts.slowed_kernels and .slowed_s.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace sim {

constexpr int MAX_DEVICES = 8;
constexpr int HOST = 0; // the number of the host among the streams
constexpr auto SIM = c10::DeviceType::PrivateUse1;

using Clock = std::vector<uint64_t>; // by the number of the stream: how far its work is known to be done
using TimePoint = std::chrono::steady_clock::time_point;

// Work of another thread. See [Note: lost peers].
class Completion {
 public:
  void finish(std::exception_ptr error = nullptr);
  void lose();
  bool is_done();
  TimePoint wait(); // of the host, until it is done: when that was; raises its error
  bool wait_to_compute(); // of an operator; false: it is lost, or takes longer than the patience that a test has set

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false, lost_ = false;
  TimePoint time_{};
  std::exception_ptr error_;
};
using Pending = std::shared_ptr<Completion>;

// Where something was launched. Python's frames are turned into text when somebody reads them.
struct Place {
  std::string op;
  std::shared_ptr<torch::CapturedTraceback> stack;
  std::string node; // of autograd, in a backward
};
using PlacePtr = std::shared_ptr<const Place>;

PlacePtr here(const std::string& op);
std::string describe(const PlacePtr& place);

struct Access {
  int stream;
  uint64_t time;
  bool write;
  uintptr_t begin, end; // bytes
  std::string argument;
  PlacePtr place;
};

// A piece of memory of a device, or of pinned memory of the host (device -1).
struct Block {
  uintptr_t address;
  size_t size, requested;
  int device, stream;
  int64_t number;
  bool live = true;
  std::vector<Access> accesses; // those that a later one can be in conflict with
  std::set<int> recorded; // streams of record_stream()
  PlacePtr allocated, freed;
};

struct Event {
  Clock clock;
  std::vector<Pending> pending;
  TimePoint time;
  int stream = -1; // never recorded
  int64_t kernels = 0; // launched by then
  int64_t capture = 0; // of which it is a part
  PlacePtr place;
};

// The host waited for a device.
struct Wait {
  std::string kind;
  PlacePtr place;
  int64_t queued; // kernels of the device that it had launched, and that it did not wait for
  std::string thread;
};

struct Counters {
  int64_t synchronizations = 0, event_waits = 0, kernels = 0, collectives = 0;
  int64_t slowed_kernels = 0; // see [Note: multiprocessors]
  double slowed_s = 0;
  int64_t host_to_device_bytes = 0, device_to_host_bytes = 0, device_to_device_bytes = 0;
  int64_t allocations = 0, segments = 0; // asked for; not served from freed memory
  std::map<std::string, int64_t> kernels_by_stream;
  std::vector<std::pair<std::string, PlacePtr>> places; // of synchronizations, copies and segments
  std::vector<Wait> waits;
};

enum class Check { OFF, COLLECT, RAISE };

// See [Note: current device]; the names of c10/cuda.
int get_device();
void set_device(int device);
void maybe_set_device(int device);
int exchange_device(int device);
void open_context(int device, const char* op);

// Streams by number: HOST, then the default stream of each device, then those of the pools.
int stream_number(c10::Stream stream);
int current_stream(int device);
std::string stream_name(int stream);

// One operator: says what it touches, then starts.
class Launch {
 public:
  Launch(const std::string& op, int stream, bool kernel = true);
  ~Launch();
  void access(const at::Tensor& tensor, bool write, const std::string& argument);
  void start(); // checks the order; blocks while work that the stream has waited for is on its way
  std::vector<Pending> start_later(); // checks the order; returns what is to be waited for, which the caller does
  void wrote(const at::Tensor& tensor); // a result, allocated since
  const PlacePtr& place() const {
    return place_;
  }

 private:
  struct Touch {
    at::Tensor tensor;
    bool write;
    std::string argument;
  };
  void check(const std::vector<Touch>& touches);

  PlacePtr place_, outer_;
  int stream_;
  bool kernel_;
  void slow_down(); // see [Note: multiprocessors]

  uint64_t time_ = 0;
  TimePoint started_{};
  std::vector<Touch> touches_;
};

// A collective runs.
class Occupation {
 public:
  explicit Occupation(int device);
  ~Occupation();

 private:
  int device_;
};
bool is_occupied(int device);

void record(Event& event, int stream);
void wait(int stream, const Event& event);
void set_pending(int stream, const Pending& pending); // all work of the stream so far
bool is_done(const Event& event); // tells the host so, too
double milliseconds_between(const Event& first, const Event& second);
void synchronize_event(const Event& event, const std::string& op);
void synchronize_stream(int stream, const std::string& op, const std::string& kind);
void synchronize_device(int device);

void record_stream(const void* address, int stream);
bool is_pinned(const void* address);
int device_of(const void* address);
int new_stream(int device);
void count_collective();
void count_copy(const std::string& kind, size_t bytes, const PlacePtr& place);
// Memory of a device lies at an address that nobody can read; its operators find it elsewhere.
void* real_address(const void* address);

at::Generator cpu_generator(const std::optional<at::Generator>& given, at::Device device); // that a device's one draws from
bool take_reset_rnn_state(int device); // whether its generator was seeded anew since the last call
std::string current_autograd_node(); // "" outside of a backward

void install();
int device_count();
void set_device_count(int count);
void set_memory_limit(int device, size_t bytes);
size_t memory_limit(int device);
void set_float64(bool has_float64);
void set_check(Check mode);
void set_patience(double seconds);
std::vector<std::string> take_errors();
std::map<int, PlacePtr> contexts(); // where each was opened
void forget_contexts(); // and be on device 0 with nothing launched, as a new process is

// See [Note: graphs].
struct Graph {
  std::vector<std::function<void()>> nodes;
  std::map<uintptr_t, std::pair<c10::Storage, std::string>> contents; // what was there before, by address
  void replay() const;
};
void begin_capture(int stream);
std::shared_ptr<Graph> end_capture();
bool is_capturing(int stream);
void add_node(std::function<void()> node);
void keep_contents(const at::Tensor& tensor); // that is about to be written
at::Tensor without_autograd(const at::Tensor& tensor);

Counters take_counters();

void report(const std::string& text); // raises or keeps an error of order

} // namespace sim
