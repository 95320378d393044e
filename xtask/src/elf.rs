//! Checks whether a binary needs a dynamic loader. A static one runs inside any image.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

/// Type of the program header that names the loader.
const PT_INTERP: u32 = 3;

/// Fails unless `path` is a 64-bit little-endian ELF file without a loader.
pub(crate) fn check_static(path: &Path) -> Result<()> {
    let bytes = std::fs::read(path).with_context(|| format!("failed to read `{}`", path.display()))?;
    let requirements =
        has_loader(&bytes).with_context(|| format!("failed to parse `{}` as ELF", path.display()))?;
    if requirements {
        bail!("`{}` is linked dynamically: see .cargo/config.toml", path.display());
    }
    Ok(())
}

/// Processor architecture of a binary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Architecture {
    X86_64,
    Aarch64,
}

/// Returns the architecture that a 64-bit little-endian ELF file is for.
pub(crate) fn architecture(path: &Path) -> Result<Architecture> {
    let bytes = std::fs::read(path).with_context(|| format!("failed to read `{}`", path.display()))?;
    ensure!(
        bytes.starts_with(b"\x7fELF\x02\x01"),
        "`{}` is not a 64-bit little-endian ELF file",
        path.display()
    );
    match read_number::<2>(&bytes, 18)? {
        62 => Ok(Architecture::X86_64),
        183 => Ok(Architecture::Aarch64),
        other => bail!("`{}` is for an unsupported architecture, ELF machine {other}", path.display()),
    }
}

fn has_loader(elf: &[u8]) -> Result<bool> {
    ensure!(elf.starts_with(b"\x7fELF\x02\x01"), "not a 64-bit little-endian ELF file");
    let table = usize::try_from(read_number::<8>(elf, 32)?)?;
    let entry_len = usize::try_from(read_number::<2>(elf, 54)?)?;
    let entries = usize::try_from(read_number::<2>(elf, 56)?)?;
    for index in 0..entries {
        if read_number::<4>(elf, table + index * entry_len)? == u64::from(PT_INTERP) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn read_number<const LEN: usize>(bytes: &[u8], at: usize) -> Result<u64> {
    let part = bytes.get(at..at + LEN).context("the file is truncated")?;
    Ok(part.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_test_binary_is_static_and_the_shell_is_not() {
        check_static(&std::env::current_exe().unwrap()).unwrap();
        let error = check_static(&std::fs::canonicalize("/bin/sh").unwrap()).unwrap_err();
        assert!(error.to_string().contains("linked dynamically"), "{error:#}");
    }

    #[test]
    fn a_file_that_is_not_elf_is_rejected() {
        assert!(has_loader(b"#!/bin/sh\n").is_err());
        assert!(has_loader(b"\x7fELF\x02\x01").is_err());
    }
}
