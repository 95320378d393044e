//! Invariants of a spool, whatever is written, truncated or placed there.

mod hostile;
mod order;
mod torn;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use windlass_testkit::{TempDir, temp_dir};

use super::*;

/// A `run` directory, removed when dropped.
struct RunDir(TempDir);

impl RunDir {
    fn new() -> Self {
        Self(temp_dir("spool").unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    fn writer(&self, stamps: &Arc<Timestamps>) -> Writer {
        Writer::open(&DirHandle::open(self.path()).unwrap(), Stream::Job, Arc::clone(stamps)).unwrap()
    }

    fn reader(&self) -> Reader {
        Reader::new(Arc::new(DirHandle::open(self.path()).unwrap()), Stream::Job)
    }
}

fn read_all(reader: &Reader, piece: usize) -> Vec<u8> {
    let mut all = Vec::new();
    loop {
        let bytes = reader.read(all.len() as u64, piece).unwrap();
        if bytes.is_empty() {
            return all;
        }
        assert!(bytes.len() <= piece);
        all.extend(bytes);
    }
}

const ALL_EVENTS: read::EventRange =
    read::EventRange { after: i64::MIN, upto: i64::MAX, bytes_max: u64::MAX, events_max: usize::MAX };
