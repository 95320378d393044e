//! Output directories of programs, moved to the output store before the attempt's directory is removed.

use std::{
    fs, io,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    str::FromStr,
};

use windlass_objects::{S3Bucket, S3Location};

use super::output_glob::OutputPatterns;

/// Location where output of containers is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum OutputStore {
    Directory(PathBuf),
    Objects(Box<S3Location>),
}

impl FromStr for OutputStore {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once("://") {
            Some(("s3", _)) => {
                text.parse().map(|place| Self::Objects(Box::new(place))).map_err(|error| format!("{error}"))
            }
            Some(_) => Err("expected a directory or `s3://BUCKET/PREFIX?endpoint=URL`".to_owned()),
            None => Ok(Self::Directory(text.into())),
        }
    }
}

impl OutputStore {
    /// Address of the output of an attempt.
    pub(super) fn address(&self, name: &str) -> String {
        match self {
            Self::Directory(dir) => dir.join(name).display().to_string(),
            Self::Objects(place) => place.address(name),
        }
    }

    /// Stores what the patterns select of a directory under the name of an attempt. Returns a warning about entries
    /// that could not be stored.
    pub(super) async fn save(
        &self,
        from: PathBuf,
        name: &str,
        patterns: OutputPatterns,
    ) -> io::Result<Option<String>> {
        let dir = from.clone();
        let selected = tokio::task::spawn_blocking(move || patterns.remove_others(&dir)).await;
        selected.map_err(io::Error::other)??;
        match self {
            Self::Directory(dir) => {
                let to = dir.join(name);
                let moved = tokio::task::spawn_blocking(move || move_dir(&from, &to)).await;
                moved.map_err(io::Error::other)?.map(|()| None)
            }
            Self::Objects(place) => {
                let credentials = place.load_credentials().map_err(io::Error::other)?;
                let bucket = S3Bucket::new((**place).clone(), credentials)?;
                upload_dir(&bucket, from, name).await
            }
        }
    }
}

/// Uploads all files below a directory. Links are not followed: a program could have created one to anything.
async fn upload_dir(bucket: &S3Bucket, from: PathBuf, name: &str) -> io::Result<Option<String>> {
    let mut omitted = 0_usize;
    let mut dirs = vec![(from, name.to_owned())];
    while let Some((dir, name)) = dirs.pop() {
        let entries = match fs::read_dir(&dir) {
            // A program that created nothing there has an empty output.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            let file_name = entry.file_name();
            let (kind, Some(file_name)) = (entry.file_type()?, file_name.to_str()) else {
                omitted += 1;
                continue;
            };
            let name = format!("{name}/{file_name}");
            if kind.is_dir() {
                dirs.push((entry.path(), name));
            } else if kind.is_file() {
                bucket.upload(&name, &entry.path()).await?;
            } else {
                omitted += 1;
            }
        }
    }
    let warning = format!(
        "{omitted} entries of `output_path` were not stored: an object store has neither links nor names that are \
         not UTF-8"
    );
    Ok((omitted > 0).then_some(warning))
}

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
