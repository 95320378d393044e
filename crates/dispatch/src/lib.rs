//! Dispatchers that pull containers from the queue.
