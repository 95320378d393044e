//! For tests: servers, simulated hosts, seeded faults, invariant checkers.
