"""How often a store is asked."""


class CountedStore:
    """A store that counts its requests, without those that only poll for a key."""

    def __init__(self, store):
        self.store, self.num_requests = store, 0
        self._polled = set()

    def __getattr__(self, name):
        function = getattr(self.store, name)

        def call(*args):
            is_poll = name in ("check", "wait") or (name == "add" and args[1] == 0)
            self.num_requests += not (is_poll and (name, str(args[0])) in self._polled)
            self._polled.add((name, str(args[0])))
            return function(*args)

        return call
