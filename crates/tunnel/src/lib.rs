//! SSH connections, channels as streams, host keys.
