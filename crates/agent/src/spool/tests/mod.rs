//! What must hold of a spool whatever is written, cut or put there.

mod hostile;
mod order;
mod torn;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use super::*;

/// A `run` directory, removed at the end.
struct Run(PathBuf);

impl Run {
    fn new() -> Self {
        let mut random = [0u8; 8];
        getrandom::fill(&mut random).unwrap();
        let path = std::env::temp_dir().join(format!("windlass-spool-{:016x}", u64::from_le_bytes(random)));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn path(&self) -> &Path {
        &self.0
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn writer(&self, stamps: &Arc<Stamps>) -> Writer {
        Writer::open(&Beneath::open(&self.0).unwrap(), Stream::Job, Arc::clone(stamps)).unwrap()
    }

    fn reader(&self) -> Reader {
        Reader::new(Arc::new(Beneath::open(&self.0).unwrap()), Stream::Job)
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn everything(reader: &Reader, piece: usize) -> Vec<u8> {
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

const ALL: read::Wanted =
    read::Wanted { after: i64::MIN, upto: i64::MAX, bytes_max: u64::MAX, events_max: usize::MAX };
