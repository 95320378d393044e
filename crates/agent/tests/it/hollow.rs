//! Tasks that only seem to run, through the runtime's own calls.
