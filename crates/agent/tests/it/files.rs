//! File archives unpacked by the real binary, as another user.

use std::{
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use windlass_agent::runner::{files, unpack::subprocess::ChildError};

use crate::repo::RepoFixture;

fn archive(path: &Path, entries: &[(&str, &str)]) -> PathBuf {
    let mut builder = tar::Builder::new(fs::File::create(path).unwrap());
    for (name, text) in entries {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o4750);
        header.set_size(text.len() as u64);
        builder.append_data(&mut header, name, text.as_bytes()).unwrap();
    }
    builder.into_inner().unwrap();
    path.to_owned()
}

#[tokio::test]
async fn the_top_level_archive_entry_is_renamed_to_the_last_path_component() {
    let ground = RepoFixture::new("files");
    let tree = archive(&ground.at("tree.tar"), &[("conf/a", "A"), ("conf/deep/b", "B")]);
    let file = archive(&ground.at("file.tar"), &[("x.json", "{}")]);
    files::unpack_to(&ground.site, &tree, "~/new/etc").await.unwrap();
    files::unpack_to(&ground.site, &file, "settings.json").await.unwrap();
    let absolute = ground.at("work/abs/olute");
    files::unpack_to(&ground.site, &tree, absolute.to_str().unwrap()).await.unwrap();

    assert_eq!(fs::read_to_string(ground.at("home/new/etc/deep/b")).unwrap(), "B");
    assert_eq!(fs::read_to_string(ground.at("work/settings.json")).unwrap(), "{}");
    assert_eq!(fs::read_to_string(absolute.join("a")).unwrap(), "A");
    for made in ["home/new", "home/new/etc", "home/new/etc/deep", "home/new/etc/a", "work/settings.json"] {
        let meta = fs::metadata(ground.at(made)).unwrap();
        assert_eq!((meta.uid(), meta.gid()), (ground.site.account.uid, ground.site.account.gid), "{made}");
    }
    let mode = fs::metadata(ground.at("work/settings.json")).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o750, "set-user-id does not come along");
    assert_eq!(fs::read_dir(ground.at("work")).unwrap().count(), 2, "nothing else is left");
}

#[tokio::test]
async fn existing_files_are_replaced_only_after_a_complete_unpack() {
    let ground = RepoFixture::new("files-old");
    fs::create_dir_all(ground.at("work/conf/old")).unwrap();
    fs::write(ground.at("work/conf/old/file"), "old").unwrap();
    let cut = archive(&ground.at("cut.tar"), &[("conf/a", "A"), ("conf/b", "B")]);
    fs::OpenOptions::new().write(true).open(&cut).unwrap().set_len(1100).unwrap();
    let error = files::unpack_to(&ground.site, &cut, "conf").await.unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert_eq!(error.to_string(), "failed to place files at `conf`");
    assert_eq!(source, "failed to unpack the archive: the archive is truncated");
    assert_eq!(fs::read_to_string(ground.at("work/conf/old/file")).unwrap(), "old");
    assert_eq!(fs::read_dir(ground.at("work")).unwrap().count(), 1, "nothing half is left");

    let whole = archive(&ground.at("whole.tar"), &[("any", "new")]);
    files::unpack_to(&ground.site, &whole, "conf").await.unwrap();
    assert_eq!(fs::read_to_string(ground.at("work/conf")).unwrap(), "new");
    // A link is replaced, not followed.
    fs::write(ground.at("elsewhere"), "untouched").unwrap();
    std::os::unix::fs::symlink(ground.at("elsewhere"), ground.at("work/link")).unwrap();
    files::unpack_to(&ground.site, &whole, "link").await.unwrap();
    assert!(fs::symlink_metadata(ground.at("work/link")).unwrap().is_file());
    assert_eq!(fs::read_to_string(ground.at("elsewhere")).unwrap(), "untouched");
}

#[tokio::test]
async fn invalid_target_paths_are_refused() {
    let ground = RepoFixture::new("files-bad");
    let file = archive(&ground.at("file.tar"), &[("x", "x")]);
    for path in ["/", "", "/..", "a\0b"] {
        let error = files::unpack_to(&ground.site, &file, path).await.unwrap_err();
        assert!(matches!(error, files::FilesError::BadPath { .. }), "{path:?}: {error}");
    }
    let missing = files::unpack_to(&ground.site, &ground.at("missing.tar"), "x").await.unwrap_err();
    assert!(
        matches!(missing, files::FilesError::Unpack { source: ChildError::Start { .. }, .. }),
        "{missing}"
    );
}
