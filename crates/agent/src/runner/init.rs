//! The first process of a task: it starts the runner, reaps what is orphaned, and leaves nothing running behind it.
