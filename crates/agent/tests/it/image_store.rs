//! The image store against a registry: real downloads, real child processes that unpack.

use std::{
    collections::BTreeSet,
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use windlass_agent::{
    digest::sha256_hex,
    image::{
        ImageStore, PullError, StoreSettings, StoredImage,
        layer::{LayerLimits, subprocess},
    },
    safe_open::{LandlockStatus, has_landlock},
    shim::runtime::ProgressCallback,
};
use windlass_registry::{ImageName, local::LocalName};
use windlass_testkit::{
    lab::registry::{ImageOptions, LayerDelivery, Registry},
    wait::eventually_async,
};

use crate::support::{TempDir, agent, images::Tar, temp_dir};

struct TestStore {
    store: ImageStore,
    scratch: TempDir,
}

impl TestStore {
    fn new() -> Self {
        Self::with(|_| {})
    }

    fn with(change: impl FnOnce(&mut StoreSettings)) -> Self {
        let scratch = temp_dir("store").unwrap();
        let mut settings = StoreSettings::default();
        change(&mut settings);
        let store = ImageStore::open(scratch.path().join("oci"), agent().to_owned(), settings).unwrap();
        Self { store, scratch }
    }

    /// Opens the same directory again, as after a crash.
    fn reopen(&mut self) {
        self.reopen_with(StoreSettings::default());
    }

    fn reopen_with(&mut self, settings: StoreSettings) {
        let root = self.scratch.path().join("oci");
        self.store = ImageStore::open(root, agent().to_owned(), settings).unwrap();
    }

    async fn pull(&self, name: &str) -> Result<StoredImage, PullError> {
        self.store.pull(&name.parse::<ImageName>().unwrap(), None, ignore_progress()).await
    }

    fn entries(&self, part: &str) -> BTreeSet<String> {
        let entries = fs::read_dir(self.scratch.path().join("oci").join(part)).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    fn read(&self, image: &StoredImage, layer: usize, path: &str) -> String {
        fs::read_to_string(self.store.layer_files(&image.layers[layer]).join(path)).unwrap()
    }
}

fn ignore_progress() -> ProgressCallback {
    std::sync::Arc::new(|_| {})
}

fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", sha256_hex(bytes))
}

fn layer(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut tar = Tar::new();
    for (name, content) in files {
        tar.file(name, content, 0o644);
    }
    tar.done()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(bytes).unwrap();
    gzip.finish().unwrap()
}

/// Compressed bytes and the digest of the uncompressed ones.
fn gzipped(files: &[(&str, &[u8])]) -> (Vec<u8>, String) {
    let plain = layer(files);
    (gzip(&plain), digest(&plain))
}

/// Bytes that do not compress, always the same.
fn noise(length: usize) -> Vec<u8> {
    let blocks = (0..length.div_ceil(32)).flat_map(|at| hex::decode(sha256_hex(&at.to_le_bytes())).unwrap());
    blocks.take(length).collect()
}

#[tokio::test]
async fn a_pulled_image_is_complete_and_pulled_once() {
    let (registry, test) = (Registry::start().await, TestStore::new());
    let layers = vec![gzipped(&[("a", b"one")]), gzipped(&[("a", b"two"), ("b/c", b"three")])];
    let options = ImageOptions {
        config: r#"{"Cmd": ["/run"], "User": "job", "Env": ["A=1"]}"#,
        ..ImageOptions::default()
    };
    let (name, by_digest) = registry.put_layers("app", "1", layers, options);
    let image = test.pull(&name).await.unwrap();
    assert_eq!((test.read(&image, 0, "a"), test.read(&image, 1, "b/c")), ("one".into(), "three".into()));
    assert_eq!(
        (image.config.command.as_slice(), image.config.user.as_str()),
        (&["/run".to_owned()][..], "job")
    );
    assert_eq!(test.entries("layers").len(), 2);
    assert_eq!((test.entries("downloads").len(), test.entries("tmp").len()), (0, 0), "nothing unfinished");
    let full = name.parse::<ImageName>().unwrap().to_string();
    assert_eq!(test.store.find(&full).unwrap().as_ref(), Some(&image));
    assert_eq!(test.store.find("docker.io/library/other:1").unwrap(), None);
    // The same image by another name shares everything.
    let again = test.pull(&by_digest).await.unwrap();
    assert_eq!(again, image);
    assert_eq!(registry.layers_requested().len(), 2, "each layer was downloaded once");
}

#[tokio::test]
async fn concurrent_pulls_download_a_common_layer_once() {
    let (registry, test) = (Registry::start().await, TestStore::new());
    let base = gzipped(&[("base", b"base")]);
    let names: Vec<String> = (0..6)
        .map(|at| {
            let own = gzipped(&[("own", at.to_string().as_bytes())]);
            registry.put_layers(&format!("app{at}"), "1", vec![base.clone(), own], ImageOptions::default()).0
        })
        .collect();
    let pulls = names.iter().map(|name| test.pull(name));
    let images = futures_util::future::try_join_all(pulls).await.unwrap();
    assert!(images.iter().all(|image| image.layers[0] == images[0].layers[0]));
    let base = digest(&base.0);
    assert_eq!(registry.layers_requested().iter().filter(|(asset, _)| *asset == base).count(), 1);
    assert_eq!(test.entries("layers").len(), 7);
}

#[tokio::test]
async fn a_pull_that_was_killed_is_resumed_where_it_stopped() {
    let (registry, mut test) = (Registry::start().await, TestStore::new());
    let big = noise(6 << 20);
    let (name, _) = registry.put_layers("app", "1", vec![gzipped(&[("big", &big)])], ImageOptions::default());
    registry.set_layers(LayerDelivery::Stall);
    let downloads = test.scratch.path().join("oci/downloads");
    {
        let pull = test.pull(&name);
        tokio::pin!(pull);
        let half = async {
            eventually_async("half of the layer arrived", async || {
                (registry.open() > 0 && partial_size(&downloads) > 0).then_some(())
            })
            .await;
        };
        tokio::select! {
            ended = &mut pull => panic!("{ended:?}"),
            () = half => {}
        }
    }
    let kept = partial_size(&downloads);
    assert!(kept > 0, "a part was kept");
    registry.set_layers(LayerDelivery::Fast);
    test.reopen();
    let image = test.pull(&name).await.unwrap();
    assert_eq!(fs::read(test.store.layer_files(&image.layers[0]).join("big")).unwrap(), big);
    let requested = registry.layers_requested();
    assert!(requested.last().unwrap().1 as u64 >= kept, "{requested:?}");
}

fn partial_size(downloads: &Path) -> u64 {
    let entries = fs::read_dir(downloads).unwrap().flatten();
    entries.filter_map(|entry| Some(entry.metadata().ok()?.len())).sum()
}

#[tokio::test]
async fn a_wrong_part_of_an_earlier_download_is_replaced() {
    let (registry, test) = (Registry::start().await, TestStore::new());
    let (blob, diff) = gzipped(&[("big", &noise(100_000))]);
    let part = test.scratch.path().join("oci/downloads").join(sha256_hex(&blob));
    let (name, _) = registry.put_layers("app", "1", vec![(blob, diff)], ImageOptions::default());
    fs::write(&part, vec![7; 5000]).unwrap();
    let image = test.pull(&name).await.unwrap();
    assert_eq!(fs::read(test.store.layer_files(&image.layers[0]).join("big")).unwrap(), noise(100_000));
    let from: Vec<usize> = registry.layers_requested().iter().map(|(_, from)| *from).collect();
    assert_eq!(from, [5000, 0]);
}

#[tokio::test]
async fn an_image_that_lies_about_its_content_is_refused_and_leaves_nothing() {
    let (registry, test) = (Registry::start().await, TestStore::new());
    let (blob, diff) = gzipped(&[("a", &noise(50_000))]);
    let put = |tag: &str, layers| registry.put_layers("app", tag, layers, ImageOptions::default()).0;
    let wrong_diff = put("diff", vec![(blob.clone(), digest(b"other"))]);
    let error = test.pull(&wrong_diff).await.unwrap_err();
    assert!(error.to_string().contains("uncompressed digest"), "{error}");
    let not_tar = put("text", vec![(b"this is no tar".repeat(100), digest(b"x"))]);
    let error = test.pull(&not_tar).await.unwrap_err();
    assert!(format!("{error:?}").contains("invalid tar header"), "{error:?}");
    let missing = registry.put_layers("app", "none", Vec::new(), ImageOptions::default()).0;
    assert!(test.pull(&missing).await.unwrap_err().to_string().contains("0 layers"));
    registry.set_layers(LayerDelivery::Corrupt);
    let corrupt = put("corrupt", vec![(blob.clone(), diff.clone())]);
    let error = test.pull(&corrupt).await.unwrap_err();
    assert!(error.to_string().contains("digest mismatch"), "{error}");
    registry.set_layers(LayerDelivery::Fast);
    assert_eq!((test.entries("layers").len(), test.entries("images").len()), (0, 0));
    eventually_async("nothing unfinished is left", async || test.entries("tmp").is_empty().then_some(()))
        .await;
    assert_eq!(test.entries("downloads").len(), 1, "verified bytes that are no layer");
    // The same blob with the right digest is pulled afterwards.
    let fine = put("fine", vec![(blob, diff)]);
    test.pull(&fine).await.unwrap();
    // A digest that is here does not give access under another claim.
    let claimed = test.pull(&wrong_diff).await.unwrap_err();
    assert!(claimed.to_string().contains("uncompressed digest"), "{claimed}");
}

#[tokio::test]
async fn an_image_that_lies_about_the_size_of_a_layer_is_refused_and_leaves_nothing() {
    let (registry, test) = (Registry::start().await, TestStore::new());
    let (blob, diff) = gzipped(&[("a", &noise(50_000))]);
    let length = blob.len() as u64;
    for (declares_length, sizes) in
        [(true, [1, length - 1, length + 1, u64::MAX]), (false, [1, length - 1, length + 1, u64::MAX])]
    {
        registry.set_declares_length(declares_length);
        for size in sizes {
            let layers = vec![(blob.clone(), diff.clone()); 2];
            let name = registry.put_sized("app", "lie", layers, &[size, size], ImageOptions::default()).0;
            let before = registry.layers_requested().len();
            let error = test.pull(&name).await.unwrap_err();
            assert!(!error.is_unreachable(), "{size}: {error}");
            assert!(
                error.to_string().contains(&format!("{size} bytes"))
                    || error.to_string().contains(&format!("declares {size}")),
                "{size}: {error}"
            );
            assert!(registry.layers_requested().len() - before <= 2, "it is not tried again");
            assert_eq!((test.entries("layers").len(), test.entries("images").len()), (0, 0));
        }
    }
    // What was received of it does not harm an honest image with the same layer.
    let fine =
        registry.put_layers("app", "fine", vec![(blob.clone(), diff.clone())], ImageOptions::default()).0;
    test.pull(&fine).await.unwrap();
    let dir = test.scratch.path().join("layout");
    for size in [1, length - 1, length + 1, u64::MAX] {
        let fresh = TestStore::new();
        let dir = write_sized_directory(&dir, &blob, &diff, size);
        let packed = test.scratch.path().join("layout.tar");
        let status = Command::new("tar").arg("-cf").arg(&packed).arg("-C").arg(&dir).arg(".").status();
        assert!(status.unwrap().success());
        for name in [format!("oci:{}", dir.display()), format!("oci-archive:{}", packed.display())] {
            let name = LocalName::parse(&name).unwrap().unwrap();
            let error = fresh.store.import(&name, ignore_progress()).await.unwrap_err();
            let is_refused =
                ["digest mismatch", "declares"].iter().any(|why| error.to_string().contains(why));
            assert!(is_refused && fresh.entries("layers").is_empty(), "{size}: {error}");
        }
    }
}

#[tokio::test]
async fn a_decompression_bomb_ends_at_the_size_limit() {
    let registry = Registry::start().await;
    let test = TestStore::with(|settings| {
        settings.limits = LayerLimits { bytes: 1 << 20, ..LayerLimits::default() }
    });
    let plain = layer(&[("zeros", &vec![0; 64 << 20])]);
    let name =
        registry.put_layers("app", "1", vec![(gzip(&plain), digest(&plain))], ImageOptions::default()).0;
    let error = test.pull(&name).await.unwrap_err();
    assert!(format!("{error:?}").contains("exceed the limit of 1048576"), "{error:?}");
    assert_eq!(test.entries("layers").len(), 0);
}

#[tokio::test]
async fn an_image_with_too_many_files_is_refused_and_leaves_nothing() {
    // Ten million files need a gigabyte of inodes, and a layer of a few megabytes can have them.
    assert!(LayerLimits::default().entries < 10_000_000);
    let registry = Registry::start().await;
    let test =
        TestStore::with(|settings| settings.limits = LayerLimits { entries: 1000, ..LayerLimits::default() });
    let names: Vec<String> = (0..1001).map(|at| format!("d{}/f{at}", at % 7)).collect();
    let files =
        |count: usize| names[..count].iter().map(|name| (name.as_str(), &b""[..])).collect::<Vec<_>>();
    let put = |tag: &str, count: usize| {
        registry.put_layers("app", tag, vec![gzipped(&files(count))], ImageOptions::default()).0
    };
    let error = test.pull(&put("many", 1001)).await.unwrap_err();
    assert!(format!("{error:?}").contains("more than 1000 entries"), "{error:?}");
    // Directories that the layer does not list count as well: 7 for 994 files are as many as it may have.
    let error = test.pull(&put("more", 994)).await.unwrap_err();
    assert!(format!("{error:?}").contains("more than 1000 entries"), "{error:?}");
    eventually_async("nothing unfinished is left", async || test.entries("tmp").is_empty().then_some(()))
        .await;
    assert_eq!((test.entries("layers").len(), test.entries("images").len()), (0, 0));
    test.pull(&put("few", 993)).await.unwrap();
}

#[tokio::test]
async fn layers_of_an_image_write_nothing_outside_of_the_store() {
    let (registry, test) = (Registry::start().await, TestStore::new());
    let outside = test.scratch.path().join("outside");
    fs::create_dir(&outside).unwrap();
    let away = outside.to_str().unwrap();
    let escape = |links: &[(&str, &str)], files: &[&str]| {
        let mut tar = Tar::new();
        links.iter().for_each(|(name, target)| tar.link(name, target));
        files.iter().for_each(|name| tar.raw_file(name, b"evil"));
        let plain = tar.done();
        (gzip(&plain), digest(&plain))
    };
    let up = format!("{}{away}/up", "../".repeat(30));
    let layers = [
        ("up", escape(&[], &[&up]), Some("..")),
        ("middle", escape(&[], &["a/../../../../etc/evil"]), Some("..")),
        // Links lead to the same path inside of the layer, as in a container.
        ("link", escape(&[("door", away)], &["door/evil"]), Some("parent")),
        ("chain", escape(&[("one", "two"), ("two", away)], &["one/evil"]), Some("parent")),
        ("parents", escape(&[("up", "../../../../../..")], &["up/evil"]), None),
        ("proc", escape(&[("root", "/proc/self/root")], &["root/tmp/evil"]), Some("parent")),
        // An absolute name is one below the root of the layer.
        ("absolute", escape(&[], &[&format!("{away}/evil")]), None),
    ];
    for (tag, layer, refusal) in layers {
        let name = registry.put_layers("escape", tag, vec![layer], ImageOptions::default()).0;
        match (test.pull(&name).await, refusal) {
            (Err(error), Some(expected)) => {
                assert!(format!("{error:?}").contains(expected), "{tag}: {error:?}")
            }
            (Ok(_), None) => {}
            (done, _) => panic!("{tag}: {done:?}"),
        }
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0, "{tag}");
    }
    assert!(!Path::new("/etc/evil").exists() && !Path::new("/evil").exists());
}

#[tokio::test]
async fn layers_of_one_image_are_downloaded_at_the_same_time() {
    let (registry, test) = (Registry::start().await, TestStore::new());
    let layers = (0..4_u8).map(|at| gzipped(&[("own", &[&[at][..], &noise(100_000)].concat())])).collect();
    let (name, _) = registry.put_layers("app", "1", layers, ImageOptions::default());
    registry.set_layers(LayerDelivery::Stall);
    {
        let pull = test.pull(&name);
        tokio::pin!(pull);
        let together = eventually_async("three layers arrive", async || (registry.open() == 3).then_some(()));
        tokio::select! {
            ended = &mut pull => panic!("{ended:?}"),
            () = together => {}
        }
        assert_eq!(registry.layers_requested().len(), 3, "no more at once");
    }
    registry.set_layers(LayerDelivery::Fast);
    assert_eq!(test.pull(&name).await.unwrap().layers.len(), 4);
}

#[tokio::test]
async fn layers_are_unpacked_with_landlock_where_the_kernel_has_it() {
    let scratch = temp_dir("landlock").unwrap();
    let (file, into) = (scratch.path().join("layer"), scratch.path().join("files"));
    fs::write(&file, layer(&[("a", b"one")])).unwrap();
    fs::create_dir(&into).unwrap();
    let source = fs::File::open(&file).unwrap();
    let (summary, landlock) = subprocess::run(agent(), source, &into, LayerLimits::default()).await.unwrap();
    assert_eq!(summary.entries, 1);
    assert_eq!(landlock == LandlockStatus::Absent, !has_landlock(), "{landlock:?}");
}

#[tokio::test]
async fn a_silent_registry_ends_a_pull_after_the_stall_time() {
    let registry = Registry::start().await;
    let test = TestStore::with(|settings| settings.stall = Duration::from_millis(300));
    let name =
        registry.put_layers("app", "1", vec![gzipped(&[("a", &noise(200_000))])], ImageOptions::default()).0;
    registry.set_layers(LayerDelivery::Stall);
    assert!(matches!(test.pull(&name).await, Err(PullError::Stalled { .. })));
}

#[tokio::test]
async fn unused_images_are_removed_by_age_and_size_and_used_layers_stay() {
    let registry = Registry::start().await;
    let mut test = TestStore::with(|settings| settings.age_min = Duration::ZERO);
    let base = gzipped(&[("base", &noise(100_000))]);
    let mut images = Vec::new();
    for at in 0..3 {
        let own = gzipped(&[("own", &[&[at][..], &noise(100_000)].concat())]);
        let name =
            registry.put_layers("app", &at.to_string(), vec![base.clone(), own], ImageOptions::default()).0;
        images.push(test.pull(&name).await.unwrap());
    }
    // Oldest first, by the time of the last use.
    test.store.touch(&images[0]).unwrap();
    let none = BTreeSet::new();
    // The maximum was lowered since.
    test.reopen_with(StoreSettings {
        age_min: Duration::ZERO,
        bytes_max: Some(250_000),
        ..StoreSettings::default()
    });
    let removed = test.store.collect_garbage(&none).unwrap();
    assert_eq!((removed.images, removed.layers), (2, 2), "{removed:?}");
    assert!(test.entries("layers").contains(&images[0].layers[1]), "the last used stays");
    let in_use: BTreeSet<String> = images[0].layers.iter().cloned().collect();
    let strict = ImageStore::open(
        test.scratch.path().join("oci"),
        agent().to_owned(),
        StoreSettings { age_min: Duration::ZERO, age_max: Duration::ZERO, ..StoreSettings::default() },
    )
    .unwrap();
    assert_eq!(strict.collect_garbage(&in_use).unwrap().images, 0, "a running task keeps its image");
    let removed = strict.collect_garbage(&none).unwrap();
    assert_eq!((removed.images, removed.layers), (1, 2));
    assert!(test.entries("layers").is_empty() && test.entries("tmp").is_empty());
}

#[tokio::test]
async fn an_image_that_exceeds_the_space_of_all_images_is_refused_and_can_be_pulled_with_more() {
    let registry = Registry::start().await;
    let layers = || [1_u8, 2].map(|at| gzipped(&[("own", &[&[at][..], &noise(100_000)].concat())])).to_vec();
    let (name, _) = registry.put_layers("app", "1", layers(), ImageOptions::default());
    for bytes_max in [50_000, 150_000] {
        let test = TestStore::with(|settings| settings.bytes_max = Some(bytes_max));
        let error = test.pull(&name).await.unwrap_err();
        assert!(format!("{error:?}").contains("bytes"), "{error:?}");
        assert!(test.entries("images").is_empty() && test.store.find(&name).unwrap().is_none());
    }
    let enough = TestStore::with(|settings| settings.bytes_max = Some(300_000));
    enough.pull(&name).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pull_removes_unused_images_for_its_space_and_is_refused_if_all_are_in_use() {
    let registry = Registry::start().await;
    let test = TestStore::with(|settings| {
        settings.age_min = Duration::ZERO;
        settings.bytes_max = Some(250_000);
    });
    let name = |at: u8| {
        let own = gzipped(&[("own", &[&[at][..], &noise(100_000)].concat())]);
        registry.put_layers("app", &at.to_string(), vec![own], ImageOptions::default()).0
    };
    let (first, second) = (test.pull(&name(1)).await.unwrap(), test.pull(&name(2)).await.unwrap());
    let third = name(3);
    let before = registry.layers_requested().len();
    let full = test.pull(&third).await.unwrap_err();
    assert!(matches!(full, PullError::Full { bytes_max: 250_000, .. }), "{full}");
    let make_space = |in_use: &[&StoredImage]| {
        let in_use: BTreeSet<String> = in_use.iter().flat_map(|image| image.layers.clone()).collect();
        tokio::task::block_in_place(|| test.store.make_space(100_001, || Some(in_use))).unwrap()
    };
    // Containers use both: nothing is removed, and the third has no space.
    assert_eq!(make_space(&[&first, &second]).images, 0);
    assert!(matches!(test.pull(&third).await.unwrap_err(), PullError::Full { .. }));
    assert_eq!((test.entries("layers").len(), test.entries("images").len()), (2, 2));
    eventually_async("nothing unfinished is left", async || test.entries("tmp").is_empty().then_some(()))
        .await;
    // One has ended.
    assert_eq!(make_space(&[&second]).images, 1);
    test.pull(&third).await.unwrap();
    assert_eq!(test.entries("layers").len(), 2);
    assert!(test.entries("layers").contains(&second.layers[0]), "the one in use stays");
    assert!(registry.layers_requested().len() > before);
}

#[tokio::test]
async fn a_layer_that_a_mirror_corrupts_is_pulled_from_its_registry() {
    let (registry, mirror) = (Registry::start().await, Registry::start().await);
    let layers = vec![gzipped(&[("big", &noise(300_000))])];
    let (name, _) = registry.put_layers("app", "1", layers.clone(), ImageOptions::default());
    mirror.put_layers("app", "1", layers, ImageOptions::default());
    let host = |name: &str| name.split('/').next().unwrap().to_owned();
    let mirrored = mirror.put_layers("other", "1", vec![gzipped(&[("a", b"a")])], ImageOptions::default()).0;
    for delivery in [LayerDelivery::Corrupt, LayerDelivery::Fast] {
        mirror.set_layers(delivery);
        let test = TestStore::with(|settings| {
            settings.registry.mirrors = [(host(&name), vec![host(&mirrored)])].into();
        });
        let image = test.pull(&name).await.unwrap();
        assert_eq!(fs::read(test.store.layer_files(&image.layers[0]).join("big")).unwrap(), noise(300_000));
        assert!(test.entries("downloads").is_empty());
    }
    assert_eq!((registry.layers_requested().len(), mirror.layers_requested().len()), (1, 2));
}

#[tokio::test]
async fn a_download_that_was_cut_or_changed_at_any_byte_is_completed() {
    let registry = Registry::start().await;
    let (blob, diff) = gzipped(&[("own", &noise(600))]);
    let (name, _) = registry.put_layers("app", "1", vec![(blob.clone(), diff)], ImageOptions::default());
    let test = TestStore::new();
    let image = test.pull(&name).await.unwrap();
    let key = image.layers[0].clone();
    let root = test.scratch.path().join("oci");
    for at in (0..=blob.len()).step_by(17).chain([blob.len() - 1, blob.len()]) {
        // A crash at this byte, before the layer was stored; every third time with a byte that a power cut changed.
        fs::remove_dir_all(root.join("layers").join(&key)).unwrap();
        let mut partial = blob[..at].to_vec();
        if at % 3 == 0
            && let Some(last) = partial.last_mut()
        {
            *last ^= 1;
        }
        fs::write(root.join("downloads").join(&key), partial).unwrap();
        let again = test.pull(&name).await.unwrap_or_else(|error| panic!("cut at byte {at}: {error:?}"));
        let own = test.store.layer_files(&again.layers[0]).join("own");
        assert_eq!(fs::read(own).unwrap(), noise(600));
    }
    assert!(test.entries("downloads").is_empty() && test.entries("tmp").is_empty());
}

/// Writes a directory in the layout of the OCI with one image, and returns its path.
fn write_oci_directory(dir: &Path, blob: &[u8], diff: &str) -> PathBuf {
    write_sized_directory(dir, blob, diff, blob.len() as u64)
}

/// The same with this size of the layer in the manifest.
fn write_sized_directory(dir: &Path, blob: &[u8], diff: &str, size: u64) -> PathBuf {
    let blobs = dir.join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    let put = |bytes: &[u8]| {
        fs::write(blobs.join(sha256_hex(bytes)), bytes).unwrap();
        serde_json::json!({"digest": digest(bytes), "size": bytes.len()})
    };
    let architecture = windlass_registry::Platform::current().architecture;
    let config = serde_json::json!({"os": "linux", "architecture": architecture, "config": {"Cmd": ["x"]},
        "rootfs": {"type": "layers", "diff_ids": [diff]}});
    let config = put(config.to_string().as_bytes());
    let mut layer = put(blob);
    layer["size"] = size.into();
    layer["mediaType"] = "application/vnd.oci.image.layer.v1.tar+gzip".into();
    let manifest = serde_json::json!({"schemaVersion": 2, "config": config, "layers": [layer]});
    let mut manifest = put(manifest.to_string().as_bytes());
    manifest["annotations"] = serde_json::json!({"org.opencontainers.image.ref.name": "v1"});
    let index = serde_json::json!({"schemaVersion": 2, "manifests": [manifest]});
    fs::write(dir.join("index.json"), index.to_string()).unwrap();
    dir.to_owned()
}

/// Writes an archive as `docker save` does.
pub(crate) fn write_docker_archive(path: &Path, plain: &[u8]) {
    let architecture = windlass_registry::Platform::current().architecture;
    let config = serde_json::json!({"os": "linux", "architecture": architecture, "config": {"Cmd": ["y"]},
        "rootfs": {"type": "layers", "diff_ids": [digest(plain)]}});
    let manifest =
        serde_json::json!([{"Config": "config.json", "RepoTags": ["app:v2"], "Layers": ["l/layer.tar"]}]);
    let mut tar = Tar::new();
    tar.file("l/layer.tar", plain, 0o644);
    tar.file("config.json", config.to_string().as_bytes(), 0o644);
    tar.file("manifest.json", manifest.to_string().as_bytes(), 0o644);
    fs::write(path, tar.done()).unwrap();
}

#[tokio::test]
async fn images_are_imported_from_directories_and_archives() {
    let test = TestStore::new();
    let (blob, diff) = gzipped(&[("a", b"from a directory")]);
    let dir = write_oci_directory(&test.scratch.path().join("layout"), &blob, &diff);
    let archive = test.scratch.path().join("saved.tar");
    write_docker_archive(&archive, &layer(&[("a", b"from an archive")]));
    let import = async |text: String| {
        let name = LocalName::parse(&text).unwrap().unwrap();
        test.store.import(&name, ignore_progress()).await
    };
    for name in [format!("oci:{}", dir.display()), format!("oci:{}:v1", dir.display())] {
        let image = import(name).await.unwrap();
        assert_eq!(test.read(&image, 0, "a"), "from a directory");
    }
    let pack = |name: &str| {
        let packed = test.scratch.path().join(name);
        let status = Command::new("tar").arg("-cf").arg(&packed).arg("-C").arg(&dir).arg(".").status();
        assert!(status.unwrap().success());
        packed
    };
    let packed = pack("layout.tar");
    for name in [format!("oci-archive:{}", packed.display()), format!("oci-archive:{}:v1", packed.display())]
    {
        let fresh = TestStore::new();
        let name = LocalName::parse(&name).unwrap().unwrap();
        let image = fresh.store.import(&name, ignore_progress()).await.unwrap();
        assert_eq!(fresh.read(&image, 0, "a"), "from a directory");
    }
    for name in
        [format!("docker-archive:{}", archive.display()), format!("docker-archive:{}:v2", archive.display())]
    {
        let image = import(name).await.unwrap();
        assert_eq!(test.read(&image, 0, "a"), "from an archive");
        assert_eq!(image.config.command, ["y"]);
    }
    let missing = import(format!("oci:{}:v9", dir.display())).await.unwrap_err();
    assert!(missing.to_string().contains("no image with the tag `v9`"), "{missing}");
    // A layer that was changed afterwards is noticed.
    let mut changed = blob.clone();
    *changed.last_mut().unwrap() ^= 1;
    fs::write(dir.join("blobs/sha256").join(sha256_hex(&blob)), changed).unwrap();
    let packed = pack("changed.tar");
    for name in [format!("oci:{}", dir.display()), format!("oci-archive:{}", packed.display())] {
        let fresh = TestStore::new();
        let name = LocalName::parse(&name).unwrap().unwrap();
        let error = fresh.store.import(&name, ignore_progress()).await.unwrap_err();
        assert!(error.to_string().contains("digest mismatch"), "{error}");
    }
}
