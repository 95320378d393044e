//! A job's output on disk, addressed by stream and byte offset.
