#include "runtime.h"

#include <Python.h>

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/DeviceGuard.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <limits>
#include <pthread.h>
#include <sstream>
#include <sys/mman.h>
#include <thread>

namespace sim {
namespace {

constexpr size_t ARENA = size_t(32) << 30; // addresses of one device; the last arena is the pinned memory
constexpr size_t ALIGNMENT = 512;
constexpr int POOL = 32; // streams of a device, as many as CUDA's pool has
constexpr int ANY_STREAM = -1;
constexpr size_t MAX_PLACES = 10000;
constexpr int MULTIPROCESSORS = 132, CHANNELS = 32; // see [Note: multiprocessors]

struct Stream {
  int device, id;
  Clock clock;
  std::vector<Pending> pending;
  std::vector<Block*> freed; // since the last allocation
  uint64_t worked = 0; // its time at the last operator or collective
  std::deque<uint64_t> kernels; // those that the host does not know to be done, by their time
  int waited_for = -1;
  PlacePtr waited;
};

struct Device {
  size_t limit = size_t(16) << 30, allocated = 0, reserved = 0;
  size_t next = 0; // first byte of the arena that was never used
  int created_streams = 0;
  c10::CachingDeviceAllocator::DeviceStats stats;
};

struct State {
  std::mutex mutex;
  int num_devices = 4;
  std::deque<Stream> streams; // references to its elements stay valid
  Device devices[MAX_DEVICES + 1]; // the last one: pinned memory
  char* addresses = nullptr; // of all arenas; protected
  char* memory = nullptr; // the same, readable
  std::map<uintptr_t, std::unique_ptr<Block>> blocks;
  std::map<std::pair<int, int>, std::multimap<size_t, Block*>> cache; // by device and stream
  int64_t num_blocks = 0, num_kernels = 0;
  Check check = Check::RAISE;
  bool has_float64 = true;
  std::vector<std::string> errors;
  Counters counters;
  std::atomic<bool> has_context[MAX_DEVICES] = {};
  std::map<int, PlacePtr> contexts;
  std::atomic<double> patience = std::numeric_limits<double>::infinity();
  std::atomic<int> collectives[MAX_DEVICES] = {}; // that run
  bool pinned_in_flight = false; // a freed block of pinned memory is still part of a copy, as far as its allocator knows
  std::atomic<int64_t> capture = 0; // the number of the one that is going on
  int64_t num_captures = 0;
  int capture_origin = 0;
  std::set<int> capturing; // streams
  std::string capture_error;
  std::shared_ptr<Graph> graph;
};

State& state() {
  static auto* it = [] {
    auto* made = new State; // never destroyed: tensors outlive everything
    auto reserve = [](int protection) {
      void* at = mmap(nullptr, ARENA * (MAX_DEVICES + 1), protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      TORCH_CHECK(at != MAP_FAILED, "simulated device: cannot reserve addresses: ", std::strerror(errno));
      return static_cast<char*>(at);
    };
    made->addresses = reserve(PROT_NONE);
    made->memory = reserve(PROT_READ | PROT_WRITE);
    made->streams.push_back({-1, 0});
    for (int device = 0; device < MAX_DEVICES; device++)
      made->streams.push_back({device, 0});
    return made;
  }();
  return *it;
}

using Lock = std::lock_guard<std::mutex>;

thread_local int driver_device = 0; // what cudaGetDevice() would return
thread_local int target_device = -1; // the one to be on as soon as something needs it; -1: that of the driver
thread_local int current_streams[MAX_DEVICES] = {}; // 0: the default stream
thread_local PlacePtr running; // the operator that this thread is in

// --- Where things happen

bool has_python() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() && !Py_IsFinalizing();
#else
  return Py_IsInitialized() && !_Py_IsFinalizing();
#endif
}

struct WithGil {
  const PyGILState_STATE state = PyGILState_Ensure();
  ~WithGil() {
    PyGILState_Release(state);
  }
};

struct WithoutGil {
  PyThreadState* saved = has_python() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~WithoutGil() {
    if (saved)
      PyEval_RestoreThread(saved);
  }
};

bool is_ours(const std::string& file) {
  return file.find("/torch/") != std::string::npos || file.find("/simulated_device/__init__") != std::string::npos;
}

} // namespace

PlacePtr here(const std::string& op) {
  auto place = std::make_shared<Place>();
  place->op = op;
  if (state().check == Check::OFF || !has_python())
    return place;
  place->node = current_autograd_node();
  place->stack = torch::CapturedTraceback::gather(true, false, false);
  return place;
}

std::string describe(const PlacePtr& place) {
  if (!place)
    return "(not known)";
  std::ostringstream text;
  text << place->op;
  if (!place->node.empty())
    text << " in the backward of " << place->node;
  if (place->stack && has_python()) {
    const WithGil gil;
    auto symbols = torch::symbolize({place->stack.get()});
    int shown = 0;
    for (auto index : symbols.tracebacks.at(0)) {
      const auto& frame = symbols.all_frames[index];
      if (!is_ours(frame.filename) && shown++ < 4)
        text << (shown == 1 ? " at " : " < ") << frame.filename << ":" << frame.lineno << " " << frame.funcname;
    }
  }
  return text.str();
}

void report(const std::string& text) {
  Check check;
  {
    Lock lock(state().mutex);
    check = state().check;
    if (check != Check::OFF)
      state().errors.push_back(text);
  }
  TORCH_CHECK(check != Check::RAISE, text);
}

// --- The current device and contexts; see [Note: current device]

static bool has_context(int device) {
  return device >= 0 && device < MAX_DEVICES && state().has_context[device];
}

void open_context(int device, const char* op) {
  if (state().has_context[device].exchange(true))
    return;
  auto place = here(op);
  Lock lock(state().mutex);
  state().contexts.emplace(device, place);
}

int get_device() {
  return target_device >= 0 ? target_device : driver_device;
}

void set_device(int device) {
  target_device = -1;
  if (std::exchange(driver_device, device) != device)
    open_context(device, "a change of the current device");
}

void maybe_set_device(int device) {
  if (has_context(device))
    set_device(device);
  else
    target_device = device;
}

int exchange_device(int device) {
  const int before = get_device();
  if (target_device >= 0) {
    target_device = -1;
    driver_device = device;
    open_context(device, "a change of the current device");
  } else {
    set_device(device);
  }
  return before;
}

namespace {

int checked(int device) {
  TORCH_CHECK(
      device >= 0 && device < state().num_devices, "sim:", device, " does not exist: there are ", state().num_devices,
      " simulated devices");
  return device;
}

// For what is done on a device and then goes back, either really or, as the guards of operators, in name only.
struct On {
  const int before = get_device();
  const bool really;
  On(int device, bool really, const char* op) : really(really) {
    set_device(device);
    open_context(device, op);
  }
  ~On() {
    really ? set_device(before) : maybe_set_device(before);
  }
};

} // namespace

// --- Graphs

namespace {

// While a graph is captured nothing runs that the host could wait for. Whoever asks, in any thread, breaks the capture.
void refuse_in_capture(const std::string& op) {
  if (!state().capture)
    return;
  auto text = describe(here(op));
  {
    Lock lock(state().mutex);
    state().capture_error = text;
  }
  TORCH_CHECK(false, "simulated device: operation not permitted when stream is capturing: ", text);
}

void refuse_captured(const Event& event, const std::string& op) {
  TORCH_CHECK(
      !event.capture, "simulated device: operation not permitted on an event last recorded in a capturing stream: ", describe(here(op)));
}

} // namespace

void begin_capture(int stream) {
  Lock lock(state().mutex);
  TORCH_CHECK(!state().capture, "simulated device: a graph is being captured already");
  state().capture = ++state().num_captures;
  state().capture_origin = stream;
  state().capturing = {stream};
  state().capture_error = "";
  state().graph = std::make_shared<Graph>();
}

bool is_capturing(int stream) {
  Lock lock(state().mutex);
  return state().capturing.count(stream) > 0;
}

// --- Work of other threads

void Completion::finish(std::exception_ptr error) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (done_)
      return;
    done_ = true;
    time_ = std::chrono::steady_clock::now();
    error_ = error;
  }
  changed_.notify_all();
}

void Completion::lose() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    lost_ = true;
  }
  changed_.notify_all();
}

bool Completion::is_done() {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_;
}

TimePoint Completion::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return done_; });
  if (error_)
    std::rethrow_exception(error_);
  return time_;
}

bool Completion::wait_to_compute() {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto over = [this] { return done_ || lost_; };
  const double patience = state().patience;
  if (std::isinf(patience))
    changed_.wait(lock, over);
  else
    changed_.wait_for(lock, std::chrono::duration<double>(patience), over);
  if (error_)
    std::rethrow_exception(error_);
  return done_;
}

// --- Clocks

namespace {

void merge(Clock& into, const Clock& from) {
  if (into.size() < from.size())
    into.resize(from.size());
  for (size_t i = 0; i < from.size(); i++)
    into[i] = std::max(into[i], from[i]);
}

bool is_after(const Clock& clock, const Access& access) {
  return size_t(access.stream) < clock.size() && clock[access.stream] >= access.time;
}

// Give a stream all that the host knows, and a new time of its own.
uint64_t tick(int number) {
  auto& stream = state().streams[number];
  merge(stream.clock, state().streams[HOST].clock);
  if (stream.clock.size() <= size_t(number))
    stream.clock.resize(number + 1);
  return ++stream.clock[number];
}

TimePoint finish(const std::vector<Pending>& all) {
  TimePoint last{};
  if (all.empty())
    return last;
  WithoutGil without;
  for (const auto& pending : all)
    last = std::max(last, pending->wait());
  return last;
}

std::vector<Pending> take_pending(int stream) {
  Lock lock(state().mutex);
  return std::exchange(state().streams[stream].pending, {});
}

} // namespace

// torch.cuda.graph ends the capture also after an exception; what CUDA says then hides it (CUDAGraph::capture_end(), with
// cudaErrorStreamCaptureInvalidated or cudaErrorStreamCaptureUnjoined).
std::shared_ptr<Graph> end_capture() {
  std::vector<Pending> pending;
  std::shared_ptr<Graph> graph;
  {
    Lock lock(state().mutex);
    state().capture = 0;
    const auto origin = state().capture_origin;
    const auto joined = std::exchange(state().capturing, {});
    graph = std::exchange(state().graph, nullptr);
    TORCH_CHECK(
        state().capture_error.empty(), "simulated device: operation failed due to a previous error during capture: ", state().capture_error);
    for (int stream : joined) {
      const auto& seen = state().streams[origin].clock;
      TORCH_CHECK(
          stream == origin || (size_t(stream) < seen.size() && state().streams[stream].worked <= seen[stream]),
          "simulated device: capturing stream has unjoined work: it did not wait for ", stream_name(stream));
      auto& ours = state().streams[stream];
      pending.insert(pending.end(), ours.pending.begin(), ours.pending.end());
      merge(state().streams[HOST].clock, ours.clock); // nothing is on its way
    }
  }
  finish(pending);
  for (const auto& [address, kept] : graph->contents)
    std::memcpy(real_address(kept.first.data()), kept.second.data(), std::min(kept.second.size(), kept.first.nbytes()));
  graph->contents.clear();
  return graph;
}

void Graph::replay() const {
  refuse_in_capture("Graph.replay");
  for (const auto& node : nodes)
    node();
}

void add_node(std::function<void()> node) {
  Lock lock(state().mutex);
  if (state().graph)
    state().graph->nodes.push_back(std::move(node));
}

void keep_contents(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  Lock lock(state().mutex);
  const auto address = reinterpret_cast<uintptr_t>(storage.data());
  if (state().graph && address && !state().graph->contents.count(address))
    state().graph->contents.emplace(
        address, std::pair(storage, std::string(static_cast<const char*>(real_address(storage.data())), storage.nbytes())));
}

// --- Streams and events

int stream_number(c10::Stream stream) {
  return stream.id() == 0 ? 1 + stream.device_index() : int(stream.id());
}

int current_stream(int device) {
  return current_streams[device] ? current_streams[device] : 1 + device;
}

std::string stream_name(int stream) {
  if (stream == HOST)
    return "the host";
  const auto device = std::to_string(state().streams[stream].device);
  return stream <= MAX_DEVICES ? "the default stream of sim:" + device
                               : "stream " + std::to_string(stream) + " of sim:" + device;
}

void record(Event& event, int stream) {
  auto place = here("Event.record");
  Lock lock(state().mutex);
  tick(stream);
  const int64_t capture = state().capturing.count(stream) ? state().capture.load() : 0;
  event = {
      state().streams[stream].clock, state().streams[stream].pending, std::chrono::steady_clock::now(), stream,
      state().num_kernels, capture, place};
}

void wait(int stream, const Event& event) {
  if (event.stream < 0)
    return;
  auto place = here("Event.wait");
  Lock lock(state().mutex);
  if (state().capture && event.capture == state().capture) {
    state().capturing.insert(stream);
  } else if (state().capturing.count(stream)) {
    state().capture_error = "a wait for work that is not part of the graph";
    TORCH_CHECK(false, "simulated device: dependency created on uncaptured work in another stream: ", stream_name(event.stream));
  }
  auto& waiting = state().streams[stream];
  merge(waiting.clock, event.clock);
  if (event.stream != stream) {
    waiting.pending.insert(waiting.pending.end(), event.pending.begin(), event.pending.end());
    waiting.waited_for = event.stream;
    waiting.waited = place;
  }
}

void set_pending(int stream, const Pending& pending) {
  Lock lock(state().mutex);
  state().streams[stream].pending = {pending};
}

int new_stream(int device) {
  Lock lock(state().mutex);
  const int created = state().devices[device].created_streams++;
  if (created < POOL) {
    state().streams.push_back({device, created});
    return state().streams.size() - 1;
  }
  int number = MAX_DEVICES + 1; // round and round, as CUDA's pool
  while (state().streams[number].device != device || state().streams[number].id != created % POOL)
    number++;
  return number;
}

namespace {

// Kernels of a device that the host has launched and that are not over when what it waits for is.
int64_t queued_kernels(int device, const Clock& clock) {
  int64_t queued = 0;
  for (size_t number = 0; number < state().streams.size(); number++) {
    auto& stream = state().streams[number];
    const auto at = [&](const Clock& clock) { return number < clock.size() ? clock[number] : 0; };
    auto& kernels = stream.kernels;
    while (!kernels.empty() && kernels.front() <= at(state().streams[HOST].clock))
      kernels.pop_front();
    if (stream.device == device)
      queued += kernels.end() - std::upper_bound(kernels.begin(), kernels.end(), at(clock));
  }
  return queued;
}

std::string thread_name() {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return name;
}

// The name in Python, for threads of Python.
std::string python_thread_name() {
  if (!has_python())
    return thread_name();
  const WithGil gil;
  std::string name = thread_name();
  auto* threading = PyImport_ImportModule("threading");
  auto* threads = threading ? PyObject_GetAttrString(threading, "_active") : nullptr;
  auto* ident = PyLong_FromUnsignedLong(PyThread_get_thread_ident());
  auto* thread = threads && ident ? PyObject_GetItem(threads, ident) : nullptr;
  auto* text = thread ? PyObject_GetAttrString(thread, "name") : nullptr;
  if (text && PyUnicode_Check(text))
    name = PyUnicode_AsUTF8(text);
  PyErr_Clear();
  for (auto* object : {threading, threads, ident, thread, text})
    Py_XDECREF(object);
  return name;
}

void synchronize(
    const Clock& clock, const std::vector<Pending>& pending, int device, const std::string& kind, const PlacePtr& place,
    int64_t kernels_since = -1) {
  const bool for_event = kernels_since >= 0;
  int64_t queued;
  {
    Lock lock(state().mutex);
    queued = queued_kernels(device, clock); // before others launch more
  }
  finish(pending);
  const auto thread = python_thread_name();
  Lock lock(state().mutex);
  auto& host = state().streams[HOST].clock;
  auto seen = host;
  merge(seen, clock);
  if (for_event && seen == host)
    return; // over, as the host knows from what it waited for before
  host = seen;
  auto& counters = state().counters;
  (for_event ? counters.event_waits : counters.synchronizations)++;
  if (counters.places.size() < MAX_PLACES)
    counters.places.emplace_back(
        for_event ? "event wait " + std::to_string(kernels_since) + " kernels later" : "synchronization", place);
  if (counters.waits.size() < MAX_PLACES)
    counters.waits.push_back({kind, place, queued, thread});
}

bool is_over(const std::vector<Pending>& all) {
  for (const auto& pending : all)
    if (!pending->is_done())
      return false;
  return true;
}

} // namespace

bool is_done(const Event& event) {
  refuse_in_capture("Event.query");
  refuse_captured(event, "Event.query");
  if (!is_over(event.pending))
    return false;
  Lock lock(state().mutex);
  merge(state().streams[HOST].clock, event.clock);
  return true;
}

double milliseconds_between(const Event& first, const Event& second) {
  for (const auto* event : {&first, &second}) {
    TORCH_CHECK(event->stream >= 0, "elapsed_time: an event was never recorded");
    Lock lock(state().mutex);
    const auto& host = state().streams[HOST].clock;
    TORCH_CHECK(
        size_t(event->stream) < host.size() && host[event->stream] >= event->clock[event->stream],
        "elapsed_time: the host has neither synchronized with an event nor seen query() return True");
  }
  const auto end = std::max(second.time, finish(second.pending)), begin = std::max(first.time, finish(first.pending));
  return std::chrono::duration<double, std::milli>(end - begin).count();
}

void synchronize_event(const Event& event, const std::string& op) {
  refuse_in_capture(op);
  refuse_captured(event, op);
  if (event.stream >= 0)
    synchronize(
        event.clock, event.pending, state().streams[event.stream].device, "event", here(op), state().num_kernels - event.kernels);
}

void synchronize_stream(int stream, const std::string& op, const std::string& kind) {
  refuse_in_capture(op);
  Event now;
  record(now, stream);
  synchronize(now.clock, now.pending, state().streams[stream].device, kind, here(op));
}

void synchronize_device(int device) {
  refuse_in_capture("synchronize");
  Clock all;
  std::vector<Pending> pending;
  {
    Lock lock(state().mutex);
    for (const auto& stream : state().streams)
      if (stream.device == device) {
        merge(all, stream.clock);
        pending.insert(pending.end(), stream.pending.begin(), stream.pending.end());
      }
  }
  synchronize(all, pending, device, "device", here("synchronize"));
}

// --- Memory

void* real_address(const void* address) {
  auto* at = static_cast<char*>(const_cast<void*>(address));
  const auto offset = at - state().addresses;
  return offset >= 0 && size_t(offset) < ARENA * MAX_DEVICES ? state().memory + offset : at;
}

int device_of(const void* address) {
  const auto offset = static_cast<const char*>(address) - state().addresses;
  return offset >= 0 && size_t(offset) < ARENA * MAX_DEVICES ? int(offset / ARENA) : -1;
}

bool is_pinned(const void* address) {
  const auto offset = static_cast<const char*>(address) - (state().memory + ARENA * MAX_DEVICES);
  return offset >= 0 && size_t(offset) < ARENA;
}

namespace {

Block* find_block(uintptr_t address) {
  auto next = state().blocks.upper_bound(address);
  if (next == state().blocks.begin())
    return nullptr;
  auto* block = std::prev(next)->second.get();
  return address < block->address + block->size ? block : nullptr;
}

std::string bytes_text(size_t bytes) {
  std::ostringstream text;
  text.precision(2);
  text << std::fixed << bytes / double(1 << 20) << " MiB";
  return text.str();
}

std::string block_text(const Block& block) {
  const auto where = block.device < 0 ? std::string("pinned memory") : "sim:" + std::to_string(block.device);
  return "block " + std::to_string(block.number) + " of " + where + ", " + std::to_string(block.requested) +
      " bytes, allocated by " + describe(block.allocated);
}

std::string access_text(const Access& access) {
  return stream_name(access.stream) + (access.write ? " writes" : " reads") + " '" + access.argument + "' of " +
      describe(access.place);
}

// A freed block goes to the next allocation of its stream. Who else used it must be done by then, or known by
// record_stream(); the caching allocator of CUDA asks for no more, and no less.
std::string unsafe_reuse(int stream) {
  Access bad;
  Block block;
  {
    Lock lock(state().mutex);
    tick(stream);
    auto& mine = state().streams[stream];
    for (auto* freed : std::exchange(mine.freed, {})) {
      if (freed->live || freed->stream != stream)
        continue; // given out since: by another thread meanwhile, or from an emptied cache, for which the device has waited
      for (const auto& access : freed->accesses)
        if (!freed->recorded.count(access.stream) && !is_after(mine.clock, access))
          bad = access, block = *freed;
      freed->accesses.clear();
      freed->recorded.clear();
    }
  }
  if (!bad.place)
    return "";
  return "simulated device: the memory of a freed tensor is reused while another stream works on it: record_stream() is "
         "missing.\n  " + access_text(bad) + "\n  It is " + block_text(block) + ",\n  freed by " +
      describe(block.freed) + ".\n  The next allocation of " + stream_name(stream) +
      ", which owns it, was given it by " + describe(running ? running : here("an allocation")) +
      "\nCall tensor.record_stream(stream) before the tensor is freed, or have its own stream wait for the other one.";
}

Block* take_cached(int device, int stream, size_t size) {
  auto& cached = state().cache[{device, stream}];
  auto found = cached.lower_bound(size);
  if (found == cached.end() || found->first > 2 * size)
    return nullptr;
  auto* block = found->second;
  cached.erase(found);
  return block;
}

void empty_cache(int device) {
  auto& any = state().cache[{device, ANY_STREAM}];
  for (auto& [key, blocks] : state().cache)
    if (key.first == device && key.second != ANY_STREAM) {
      for (auto& [size, block] : blocks) {
        state().devices[device].reserved -= size;
        any.emplace(size, block);
      }
      blocks.clear();
    }
}

void set_stat(c10::CachingAllocator::StatArray& stats, int64_t change) {
  change < 0 ? stats[0].decrease(-change) : stats[0].increase(change);
}

void count_bytes(Device& device, int64_t change, int64_t requested) {
  device.allocated += change;
  for (auto* stats : {&device.stats.allocated_bytes, &device.stats.active_bytes})
    set_stat(*stats, change);
  for (auto* stats : {&device.stats.allocation, &device.stats.active})
    set_stat(*stats, change < 0 ? -1 : 1);
  set_stat(device.stats.requested_bytes, requested);
}

// Pinned memory has the device MAX_DEVICES here, and no stream.
Block* take_block(int device, int stream, size_t requested) {
  auto& home = state().devices[device];
  const size_t size = std::max((requested + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, ALIGNMENT);
  if (auto* block = take_cached(device, stream, size))
    return block;
  if (home.reserved + size > home.limit)
    empty_cache(device);
  auto* block = take_cached(device, ANY_STREAM, size);
  const size_t taken = block ? block->size : size;
  if (home.reserved + taken > home.limit || (!block && home.next + size > ARENA))
    return nullptr;
  home.reserved += taken;
  set_stat(home.stats.reserved_bytes, taken);
  state().counters.segments += device < MAX_DEVICES;
  if (!block) {
    auto* base = device < MAX_DEVICES ? state().addresses : state().memory;
    const auto address = reinterpret_cast<uintptr_t>(base + ARENA * device + home.next);
    home.next += size;
    auto fresh = std::make_unique<Block>();
    block = fresh.get();
    block->address = address;
    block->size = size;
    state().blocks[address] = std::move(fresh);
  }
  return block;
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  auto place = here("a release");
  // Whoever reads it later, or reads what it never wrote, shall see it.
  std::memset(real_address(reinterpret_cast<void*>(block->address)), 0xff, block->requested);
  Lock lock(state().mutex);
  block->live = false;
  block->freed = place;
  state().pinned_in_flight |= block->device < 0 && !block->recorded.empty();
  const int device = block->device < 0 ? MAX_DEVICES : block->device;
  count_bytes(state().devices[device], -int64_t(block->size), -int64_t(block->requested));
  auto& cached = state().cache[{device, block->stream}];
  cached.emplace_hint(cached.lower_bound(block->size), block->size, block); // the last freed is the first reused
  if (block->device >= 0)
    state().streams[block->stream].freed.push_back(block);
}

Block* allocate_block(int device, int stream, size_t bytes) {
  auto place = running ? running : here("an allocation");
  Lock lock(state().mutex);
  auto& counters = state().counters;
  const auto segments = counters.segments;
  auto* block = take_block(device, stream, bytes);
  if (!block)
    return nullptr;
  if (counters.segments > segments && counters.places.size() < MAX_PLACES)
    counters.places.emplace_back("segment", place);
  *block = {block->address, block->size, bytes, device < MAX_DEVICES ? device : -1, stream, ++state().num_blocks};
  block->allocated = place;
  count_bytes(state().devices[device], block->size, bytes);
  counters.allocations += device < MAX_DEVICES;
  return block;
}

[[noreturn]] void out_of_memory(int device, size_t bytes) {
  const auto& home = state().devices[device];
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "sim out of memory. Tried to allocate ", bytes_text(bytes), ". Device ", device,
      " has a total capacity of ", bytes_text(home.limit), " of which ", bytes_text(home.limit - home.reserved),
      " is free. ", bytes_text(home.allocated), " is allocated by PyTorch.");
}

struct DeviceAllocator final : c10::DeviceAllocator {
  at::DataPtr allocate(size_t bytes) override {
    const int device = get_device(), stream = current_stream(device);
    const at::Device where(SIM, device);
    if (bytes == 0)
      return {nullptr, where};
    open_context(device, "an allocation");
    if (auto text = unsafe_reuse(stream); !text.empty())
      report(text);
    auto* block = allocate_block(device, stream, bytes);
    if (!block)
      out_of_memory(device, bytes);
    return {reinterpret_cast<void*>(block->address), block, &free_block, where};
  }
  at::DeleterFnPtr raw_deleter() const override {
    return nullptr; // a pointer alone does not lead to its block
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(real_address(to), real_address(from), bytes);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < state().num_devices; device++) {
      if (!has_context(device))
        continue;
      synchronize_device(device);
      Lock lock(state().mutex);
      empty_cache(device);
    }
  }
  void recordStream(const at::DataPtr& pointer, c10::Stream stream) override {
    record_stream(pointer.get(), stream_number(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock(state().mutex);
    return state().devices[device].stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Lock lock(state().mutex);
    auto& stats = state().devices[device].stats;
    for (auto* each : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes, &stats.requested_bytes, &stats.allocation, &stats.active})
      (*each)[0].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock(state().mutex);
    auto& stats = state().devices[device].stats;
    for (auto* each : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes, &stats.requested_bytes, &stats.allocation, &stats.active})
      (*each)[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const On on(checked(device), false, "get_memory_info");
    Lock lock(state().mutex);
    const auto& home = state().devices[device];
    return {home.limit - home.reserved, home.limit};
  }
};

struct PinnedAllocator final : at::HostAllocator {
  at::DataPtr allocate(size_t bytes) override {
    // It first queries the events of copies from and to blocks that were freed, wherever the thread is. New memory is
    // taken in any context that there is.
    bool none = true;
    for (int device = 0; device < MAX_DEVICES; device++)
      none &= !has_context(device);
    if (std::exchange(state().pinned_in_flight, false) || none)
      open_context(driver_device, "an allocation of pinned memory");
    auto* block = allocate_block(MAX_DEVICES, ANY_STREAM, bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, block, "sim out of pinned memory");
    return {reinterpret_cast<void*>(block->address), block, &free_block, at::kCPU};
  }
  at::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool record_event(void*, void*, c10::Stream) override {
    return true; // reuse is always safe here: a freed block forgets its accesses
  }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    return {};
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;
REGISTER_ALLOCATOR(SIM, &device_allocator)
REGISTER_HOST_ALLOCATOR(SIM, &pinned_allocator)

} // namespace

void record_stream(const void* address, int stream) {
  Lock lock(state().mutex);
  if (auto* block = find_block(reinterpret_cast<uintptr_t>(address)))
    block->recorded.insert(stream);
}

void count_copy(const std::string& kind, size_t bytes, const PlacePtr& place) {
  Lock lock(state().mutex);
  auto& counters = state().counters;
  (kind == "host to device" ? counters.host_to_device_bytes
       : kind == "device to host" ? counters.device_to_host_bytes
                                  : counters.device_to_device_bytes) += bytes;
  if (counters.places.size() < MAX_PLACES)
    counters.places.emplace_back(kind, place);
}

// --- The check of every access

Launch::Launch(const std::string& op, int stream, bool kernel)
    : place_(here(op)), outer_(std::exchange(running, place_)), stream_(stream), kernel_(kernel) {}

static void refuse_float64(const at::Tensor& tensor) {
  TORCH_CHECK(
      state().has_float64 || !tensor.defined() || tensor.device().type() != SIM || tensor.scalar_type() != at::kDouble,
      "simulated device: it has no float64");
}

Launch::~Launch() {
  running = outer_;
  slow_down();
}

void Launch::slow_down() {
  if (started_ == TimePoint{} || !is_occupied(state().streams[stream_].device))
    return;
  const auto taken = std::chrono::steady_clock::now() - started_;
  const auto more = taken * CHANNELS / (MULTIPROCESSORS - CHANNELS);
  {
    Lock lock(state().mutex);
    state().counters.slowed_kernels++;
    state().counters.slowed_s += std::chrono::duration<double>(more).count();
  }
  const WithoutGil without;
  std::this_thread::sleep_for(more);
}

bool is_occupied(int device) {
  return state().collectives[device] > 0;
}

Occupation::Occupation(int device) : device_(device) {
  state().collectives[device]++;
}

Occupation::~Occupation() {
  state().collectives[device_]--;
}

void Launch::access(const at::Tensor& tensor, bool write, const std::string& argument) {
  refuse_float64(tensor);
  if (tensor.defined() && tensor.numel() > 0)
    touches_.push_back({tensor, write, argument});
}

void Launch::start() {
  std::vector<Pending> lost;
  if (const auto before = start_later(); !before.empty()) {
    WithoutGil without;
    for (const auto& pending : before)
      if (!pending->wait_to_compute())
        lost.push_back(pending);
  }
  if (kernel_ && stream_ != HOST)
    started_ = std::chrono::steady_clock::now();
  if (lost.empty())
    return;
  Lock lock(state().mutex);
  auto& pending = state().streams[stream_].pending;
  pending.insert(pending.end(), lost.begin(), lost.end());
}

std::vector<Pending> Launch::start_later() {
  if (stream_ != HOST)
    open_context(state().streams[stream_].device, place_->op.c_str());
  {
    Lock lock(state().mutex);
    time_ = state().streams[stream_].worked = tick(stream_);
    if (kernel_ && stream_ != HOST) {
      state().num_kernels++;
      state().counters.kernels++;
      state().counters.kernels_by_stream[stream_name(stream_)]++;
      state().streams[stream_].kernels.push_back(time_);
    }
  }
  check(touches_);
  return take_pending(stream_);
}

void Launch::wrote(const at::Tensor& tensor) {
  refuse_float64(tensor);
  if (tensor.defined() && tensor.numel() > 0)
    check({{tensor, true, "the result"}});
}

namespace {

struct Conflict {
  Access before, now;
  Block block;
  at::Tensor tensor;
  int waited_for;
  PlacePtr waited;
};

std::string tensor_text(const at::Tensor& tensor) {
  std::ostringstream text;
  text << "a " << tensor.dtype() << " tensor of shape " << tensor.sizes() << " on " << tensor.device();
  return text.str();
}

std::string conflict_text(const Conflict& found) {
  std::string text = found.now.stream == HOST
      ? "simulated device: the host touches memory that a stream may still work on: a synchronization is missing.\n"
      : "simulated device: two streams touch a tensor with no event between them.\n";
  text += "  before: " + access_text(found.before) + "\n  now: " + access_text(found.now) + "\n  It is " +
      tensor_text(found.tensor) + ", in " + block_text(found.block) + ".\n";
  if (found.now.stream == HOST)
    return text + "Synchronize with the stream, or with an event that it recorded afterwards, before the host goes on.";
  text += found.waited ? "  " + stream_name(found.now.stream) + " last waited for " + stream_name(found.waited_for) + ", by " +
          describe(found.waited) + ".\n"
                       : "  " + stream_name(found.now.stream) + " never waited for another stream.\n";
  return text + "Have it wait (stream.wait_stream(), event.wait()) for what " + stream_name(found.before.stream) +
      " does before.";
}

// What a later access can be in conflict with: a write replaces all that it covers, a read the same read before.
void remember(Block& block, const Access& access) {
  auto& all = block.accesses;
  all.erase(
      std::remove_if(all.begin(), all.end(), [&](const Access& old) {
        const bool covered = access.begin <= old.begin && old.end <= access.end;
        return covered && (access.write || (!old.write && old.stream == access.stream));
      }),
      all.end());
  all.push_back(access);
}

} // namespace

void Launch::check(const std::vector<Touch>& touches) {
  if (state().check == Check::OFF)
    return;
  std::vector<Conflict> conflicts;
  std::string stale;
  {
    Lock lock(state().mutex);
    auto& mine = state().streams[stream_];
    for (const auto& touch : touches) {
      const auto& storage = touch.tensor.storage(); // may have been resized
      const auto begin = reinterpret_cast<uintptr_t>(touch.tensor.const_data_ptr());
      size_t elements = 1;
      for (int64_t i = 0; i < touch.tensor.dim(); i++)
        elements += (touch.tensor.size(i) - 1) * touch.tensor.stride(i);
      const Access now{stream_, time_, touch.write, begin, begin + elements * touch.tensor.element_size(), touch.argument, place_};
      auto* block = find_block(begin);
      if ((block && !block->live) || now.end > reinterpret_cast<uintptr_t>(storage.data()) + storage.nbytes())
        stale = tensor_text(touch.tensor);
      if (!block)
        continue;
      for (const auto& before : block->accesses)
        if ((before.write || now.write) && before.begin < now.end && now.begin < before.end && !is_after(mine.clock, before))
          conflicts.push_back({before, now, *block, touch.tensor, mine.waited_for, mine.waited});
      remember(*block, now);
    }
  }
  if (!stale.empty())
    TORCH_CHECK(false, "simulated device: ", describe(place_), " uses memory that was freed: ", stale, ".");
  for (const auto& conflict : conflicts)
    report(conflict_text(conflict));
}

// --- What torch asks a device for

namespace {

struct Generator final : c10::GeneratorImpl {
  // A device draws the numbers that the CPU draws from the same seed, so that both can be compared.
  at::Generator cpu;
  std::atomic<bool> reset_rnn_state = true; // as CUDAGeneratorImpl's, after whatever sets a seed or an offset

  Generator(c10::DeviceIndex device, at::Generator cpu)
      : GeneratorImpl(at::Device(SIM, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), cpu(std::move(cpu)) {}
  void set_current_seed(uint64_t seed) override {
    cpu.set_current_seed(seed);
    reset_rnn_state = true;
  }
  uint64_t current_seed() const override {
    return cpu.current_seed();
  }
  uint64_t seed() override {
    reset_rnn_state = true;
    return cpu.unsafeGetGeneratorImpl()->seed();
  }
  void set_offset(uint64_t offset) override {
    cpu.set_offset(offset);
    reset_rnn_state = true;
  }
  uint64_t get_offset() const override {
    return cpu.get_offset();
  }
  void set_state(const c10::TensorImpl& state) override {
    cpu.unsafeGetGeneratorImpl()->set_state(state);
    reset_rnn_state = true;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu.unsafeGetGeneratorImpl()->get_state();
  }
  GeneratorImpl* clone_impl() const override {
    return new Generator(device_.index(), cpu.clone());
  }
};

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<Generator>(device < 0 ? get_device() : device, at::make_generator<at::CPUGeneratorImpl>());
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return state().num_devices > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    return has_context(device);
  }
  c10::DeviceIndex deviceCount() const override {
    return state().num_devices;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return get_device();
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_device(checked(device));
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? -1 : exchange_device(checked(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    const int before = get_device();
    if (device >= 0)
      maybe_set_device(checked(device));
    return before;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    static auto* all = [] {
      auto* made = new std::vector<at::Generator>;
      for (int i = 0; i < MAX_DEVICES; i++)
        made->push_back(new_generator(i));
      return made;
    }();
    return all->at(device < 0 ? get_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    return {SIM, c10::DeviceIndex(device_of(data))};
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto fresh = device_allocator.allocate(bytes);
    if (const auto kept = std::min(bytes, storage.nbytes()))
      device_allocator.copy_data(fresh.get(), storage.data(), kept);
    auto* impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(bytes);
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream make(int device, int number) {
    return c10::Stream(c10::Stream::UNSAFE, at::Device(SIM, device), number <= MAX_DEVICES ? 0 : number);
  }
  static Event& as_event(void* event) {
    return *static_cast<Event*>(event);
  }
  static int index(at::Device device) {
    return checked(device.has_index() ? device.index() : get_device());
  }

  c10::DeviceType type() const override {
    return SIM;
  }
  at::Device exchangeDevice(at::Device device) const override {
    return {SIM, c10::DeviceIndex(exchange_device(checked(device.index())))};
  }
  at::Device getDevice() const override {
    return {SIM, c10::DeviceIndex(get_device())};
  }
  void setDevice(at::Device device) const override {
    // A thread of autograd begins with this, for any device there is: torch 2.13 only if that has a context, an older one
    // only if it was built for CUDA.
    thread_local bool begins = thread_name().rfind("pt_autograd_", 0) == 0;
    if (!std::exchange(begins, false) || has_context(device.index()))
      set_device(checked(device.index()));
  }
  void uncheckedSetDevice(at::Device device) const noexcept override {
    maybe_set_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return state().num_devices;
  }
  c10::DeviceCapability getDeviceCapability(at::Device) const override {
    return {};
  }

  c10::Stream getStream(at::Device device) const override {
    return make(index(device), current_stream(index(device)));
  }
  c10::Stream getDefaultStream(at::Device device) const override {
    return make(index(device), 0);
  }
  c10::Stream getNewStream(at::Device device, int) const override {
    const On on(index(device), false, "a new stream");
    return make(index(device), new_stream(index(device)));
  }
  c10::Stream getStreamFromGlobalPool(at::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream_number(stream);
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    const On on(stream.device_index(), false, "Stream.query");
    Event now;
    sim::record(now, stream_number(stream));
    return is_done(now);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    const On on(stream.device_index(), false, "Stream.synchronize");
    synchronize_stream(stream_number(stream), "Stream.synchronize", "stream");
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    const On on(checked(device), true, "synchronize");
    synchronize_device(device);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    const On on(stream.device_index(), true, "Event.record");
    if (!*event)
      *event = new Event;
    sim::record(as_event(*event), stream_number(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event)
      return;
    const On on(stream.device_index(), true, "Event.wait");
    sim::wait(stream_number(stream), as_event(event));
  }
  bool queryEvent(void* event) const override {
    if (!event)
      return true;
    open_context(driver_device, "Event.query");
    return is_done(as_event(event));
  }
  void synchronizeEvent(void* event) const override {
    if (!event)
      return;
    open_context(driver_device, "Event.synchronize");
    synchronize_event(as_event(event), "Event.synchronize");
  }
  void destroyEvent(void* event, c10::DeviceIndex device) const noexcept override {
    if (!event)
      return;
    const On on(device, true, "the release of an event");
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex device) const override {
    TORCH_CHECK(first && second, "elapsed_time: an event was never recorded");
    const On on(device, true, "Event.elapsed_time");
    return milliseconds_between(as_event(first), as_event(second));
  }
  void recordDataPtrOnStream(const at::DataPtr& pointer, const c10::Stream& stream) const override {
    record_stream(pointer.get(), stream_number(stream));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

} // namespace

at::Generator cpu_generator(const std::optional<at::Generator>& given, at::Device device) {
  const auto& generator = given && given->defined() ? *given : at::detail::getPrivateUse1Hooks().getDefaultGenerator(device.index());
  TORCH_CHECK(
      generator.device().type() == SIM, "Expected a 'sim' device type for generator but found '", generator.device(), "'");
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->cpu;
}

bool take_reset_rnn_state(int device) {
  const auto& generator = at::detail::getPrivateUse1Hooks().getDefaultGenerator(device);
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->reset_rnn_state.exchange(false);
}

// --- What a test sets and asks

void install() {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

int device_count() {
  return state().num_devices;
}

void set_device_count(int count) {
  TORCH_CHECK(count >= 1 && count <= MAX_DEVICES, "1 to ", MAX_DEVICES, " devices can be simulated, not ", count);
  state().num_devices = count;
}

void set_memory_limit(int device, size_t bytes) {
  Lock lock(state().mutex);
  state().devices[checked(device)].limit = bytes;
}

size_t memory_limit(int device) {
  Lock lock(state().mutex);
  return state().devices[checked(device)].limit;
}

void set_float64(bool has_float64) {
  Lock lock(state().mutex);
  state().has_float64 = has_float64;
}

void set_check(Check mode) {
  Lock lock(state().mutex);
  state().check = mode;
}

void set_patience(double seconds) {
  state().patience = seconds;
}

std::map<int, PlacePtr> contexts() {
  Lock lock(state().mutex);
  return state().contexts;
}

void forget_contexts() {
  Lock lock(state().mutex);
  for (auto& has : state().has_context)
    has = false;
  state().contexts.clear();
  auto& host = state().streams[HOST].clock;
  for (auto& stream : state().streams) { // what was launched before is over
    const auto clock = stream.clock;
    merge(host, clock);
    stream.pending.clear();
  }
  driver_device = 0;
  target_device = -1;
}

std::vector<std::string> take_errors() {
  Lock lock(state().mutex);
  return std::exchange(state().errors, {});
}

Counters take_counters() {
  Lock lock(state().mutex);
  return std::exchange(state().counters, {});
}

void count_collective() {
  Lock lock(state().mutex);
  state().counters.collectives++;
}

} // namespace sim
