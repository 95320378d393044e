//! Tree of small files that stands for the kernel's, removed when dropped.

use std::{fs, path::Path};

use windlass_testkit::{TempDir, temp_dir};

pub(crate) struct Fixture(TempDir);

impl Fixture {
    pub(crate) fn new() -> Self {
        Self(temp_dir("host").unwrap())
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        let path = self.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
}
