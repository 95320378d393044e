//! A scripted cloud for tests and trials: prices, spot, preemption, no capacity, slow boots.
