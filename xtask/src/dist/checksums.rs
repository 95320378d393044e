//! Checksums of a release, and their signature by a key of the user.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use super::tree;
use crate::process;

pub(super) const FILE: &str = "SHA256SUMS";
/// Namespace of the signatures, which `ssh-keygen -Y verify` must be given.
pub(super) const NAMESPACE: &str = "windlass-release";

/// Writes the checksums of `files` in the format of `sha256sum`.
pub(super) fn write(dir: &Path, files: &[PathBuf]) -> Result<PathBuf> {
    let mut lines = Vec::new();
    for file in files {
        let name = file.file_name().and_then(|name| name.to_str()).context("a file has no name")?;
        lines.push((name.to_owned(), tree::sha256(file)?));
    }
    lines.sort();
    let text: String = lines.iter().map(|(name, digest)| format!("{digest}  {name}\n")).collect();
    let path = dir.join(FILE);
    fs::write(&path, text).with_context(|| format!("failed to write `{}`", path.display()))?;
    // The signature of an earlier call is for other files.
    let _ = fs::remove_file(signature_path(&path));
    Ok(path)
}

fn signature_path(checksums: &Path) -> PathBuf {
    checksums.with_extension("sig")
}

/// Signs the checksums with an SSH key and returns the path of the signature.
pub(super) fn sign(checksums: &Path, key: &Path) -> Result<PathBuf> {
    ensure!(
        key.exists(),
        "the key `{}` does not exist: `ssh-keygen -t ed25519 -f FILE` makes one",
        key.display()
    );
    let mut command = Command::new("ssh-keygen");
    command.args(["-q", "-Y", "sign", "-n", NAMESPACE, "-f"]).arg(key).arg(checksums);
    process::run(&mut command)?;
    Ok(signature_path(checksums))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::ScratchDir;

    #[test]
    fn signed_checksums_verify_and_changed_ones_do_not() {
        let scratch = ScratchDir::new("dist-sign").unwrap();
        let dir = scratch.path();
        fs::write(dir.join("b.txt"), "two").unwrap();
        fs::write(dir.join("a.txt"), "one").unwrap();
        let sums = write(dir, &[dir.join("b.txt"), dir.join("a.txt")]).unwrap();
        process::run_for_stdout(Command::new("sha256sum").args(["-c", FILE]).current_dir(dir)).unwrap();
        assert!(fs::read_to_string(&sums).unwrap().lines().next().unwrap().ends_with("  a.txt"));

        let key = dir.join("key");
        assert!(sign(&sums, &key).unwrap_err().to_string().contains("does not exist"));
        let mut keygen = Command::new("ssh-keygen");
        process::run(keygen.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(&key)).unwrap();
        let signature = sign(&sums, &key).unwrap();
        let public = fs::read_to_string(dir.join("key.pub")).unwrap();
        fs::write(dir.join("signers"), format!("release {public}")).unwrap();
        let verifies = || {
            let mut verify = Command::new("ssh-keygen");
            verify.args(["-Y", "verify", "-f", "signers", "-I", "release", "-n", NAMESPACE, "-s"]);
            let input = fs::File::open(&sums).unwrap();
            let output = verify.arg(&signature).current_dir(dir).stdin(input).output().unwrap();
            output.status.success()
        };
        assert!(verifies());
        fs::write(&sums, "0  a.txt\n").unwrap();
        assert!(!verifies());
    }
}
