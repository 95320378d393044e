//! When a job that ended badly is tried again.

use crate::machine::words;

words! {
    /// What `retry.on_events` may name.
    pub enum Event: "retry event" {
        /// no instance could be had
        NoCapacity = "no-capacity",
        /// a spot instance was taken back
        Interruption = "interruption",
        /// anything else that fails
        Error = "error",
    }
}
