//! Output directories of programs, moved to the output store before the attempt's directory is removed.

use std::{
    fs, io,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::Path,
};

/// Returns whether a directory has any entries.
pub(super) fn has_entries(dir: &Path) -> bool {
    fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_some())
}

/// Moves a directory with its contents. Replaces what an earlier attempt left at the target. Links are kept as they are
/// and never followed: a program could have created one to anything.
pub(super) fn move_dir(from: &Path, to: &Path) -> io::Result<()> {
    if let Some(above) = to.parent() {
        fs::create_dir_all(above)?;
    }
    match fs::remove_dir_all(to) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    match fs::rename(from, to) {
        Ok(()) => Ok(()),
        // A program that created nothing there has an empty output.
        Err(error) if error.kind() == io::ErrorKind::NotFound => fs::create_dir_all(to),
        Err(error) if error.kind() == io::ErrorKind::CrossesDevices => copy_dir(from, to),
        Err(error) => Err(error),
    }
}

fn copy_dir(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (kind, target) = (entry.file_type()?, to.join(entry.file_name()));
        if kind.is_dir() {
            copy_dir(&entry.path(), &target)?;
        } else if kind.is_symlink() {
            symlink(fs::read_link(entry.path())?, target)?;
        } else if kind.is_file() {
            fs::copy(entry.path(), target)?;
        }
        // Sockets, pipes and devices have no meaning elsewhere.
    }
    let mode = fs::metadata(from)?.permissions().mode();
    fs::set_permissions(to, fs::Permissions::from_mode(mode | 0o700))
}

#[cfg(test)]
mod tests {
    use windlass_testkit::temp_dir;

    use super::*;

    fn made(dir: &Path) {
        fs::create_dir_all(dir.join("below")).unwrap();
        fs::write(dir.join("below/file"), "kept").unwrap();
        symlink("/etc/passwd", dir.join("link")).unwrap();
    }

    #[test]
    fn moving_or_copying_a_directory_keeps_nested_files_and_symlinks() {
        let scratch = temp_dir("output").unwrap();
        for (name, move_it) in
            [("moved", move_dir as fn(&Path, &Path) -> io::Result<()>), ("copied", copy_dir)]
        {
            let (from, to) = (scratch.path().join("from"), scratch.path().join(name));
            made(&from);
            move_it(&from, &to).unwrap();
            assert_eq!(fs::read_to_string(to.join("below/file")).unwrap(), "kept");
            assert_eq!(fs::read_link(to.join("link")).unwrap(), Path::new("/etc/passwd"));
            let _ = fs::remove_dir_all(&from);
        }
    }

    #[test]
    fn a_repeated_move_replaces_the_output_and_a_missing_source_gives_an_empty_output() {
        let scratch = temp_dir("output").unwrap();
        let (from, to) = (scratch.path().join("from"), scratch.path().join("kept/c.1"));
        made(&from);
        assert!(has_entries(&from));
        move_dir(&from, &to).unwrap();
        move_dir(&from, &to).unwrap();
        assert!(to.is_dir() && !has_entries(&to));
    }
}
