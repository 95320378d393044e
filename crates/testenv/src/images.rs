//! Images for registries of tests.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use std::{path::Path, process::Command};

use windlass_testkit::temp_dir;

/// Returns a layer with a static busybox, an account, and another program.
pub fn busybox_layer(program: Option<&Path>) -> Vec<u8> {
    let temp = temp_dir("layer").unwrap();
    let dir = temp.path();
    std::fs::create_dir_all(dir.join("bin")).unwrap();
    std::fs::create_dir(dir.join("etc")).unwrap();
    std::fs::copy("/usr/bin/busybox", dir.join("bin/busybox")).unwrap();
    if let Some(program) = program {
        std::fs::copy(program, dir.join("bin").join(program.file_name().unwrap())).unwrap();
    }
    std::fs::write(dir.join("etc/passwd"), "root:x:0:0::/root:/bin/sh\njob:x:1000:1000::/home:/bin/sh\n")
        .unwrap();
    std::fs::write(dir.join("etc/group"), "root:x:0:\njob:x:1000:\n").unwrap();
    for name in ["sh", "cat", "echo", "env", "id", "readlink", "sleep", "stat", "tail", "head", "touch", "ls"]
    {
        std::os::unix::fs::symlink("busybox", dir.join("bin").join(name)).unwrap();
    }
    let message =
        Command::new("tar").arg("-C").arg(dir).args(["--owner=0", "--group=0", "-c", "bin", "etc"]).output();
    message.unwrap().stdout
}
