//! Groups of ours: made for a task, limited, killed and removed.
