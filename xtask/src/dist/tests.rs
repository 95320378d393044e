//! Tests of the files of a release. The programs are stand-ins: their content does not matter here.

use std::{collections::BTreeSet, io::Read};

use serde_json::Value;

use super::*;

const EPOCH: u64 = 1_700_000_000;

/// Returns a release of two stand-ins for the programs, which are written to `dir`.
fn example(dir: &Path) -> Release {
    for name in release::binaries() {
        fs::write(dir.join(name), format!("program {name}\n").repeat(5000)).unwrap();
    }
    let help = HelpTexts::from([
        ("windlass".to_owned(), "Runs workloads\n\nUsage: windlass <COMMAND>\n".to_owned()),
        ("windlass server".to_owned(), "Run the server\n\nUsage: windlass server\n".to_owned()),
        ("windlass-agent".to_owned(), "The agent\n\nUsage: windlass-agent\n".to_owned()),
    ]);
    Release {
        version: "1.2.3".to_owned(),
        architecture: Architecture::X86_64,
        epoch: EPOCH,
        programs: dir.to_owned(),
        help,
        completions: COMPLETIONS.iter().map(|(shell, _)| (*shell, format!("# {shell}\n"))).collect(),
        sbom: "{}".to_owned(),
        packaging: Packaging::read(&Workspace::find().unwrap()).unwrap(),
    }
}

/// Returns the lines of `dpkg-deb --contents`: mode, owner and path.
fn list_package(package: &Path) -> Vec<(String, String, String)> {
    let text = process::run_for_stdout(Command::new("dpkg-deb").arg("--contents").arg(package)).unwrap();
    let line = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        (words[0].to_owned(), words[1].to_owned(), words[5].to_owned())
    };
    text.lines().map(line).collect()
}

fn field(package: &Path, name: &str) -> String {
    let mut command = Command::new("dpkg-deb");
    process::run_for_stdout(command.arg("--field").arg(package).arg(name)).unwrap().trim().to_owned()
}

#[test]
fn the_same_input_gives_the_same_bytes() {
    let scratch = ScratchDir::new("dist-same").unwrap();
    let mut sums = Vec::new();
    for name in ["one", "two"] {
        let dir = scratch.path().join(name);
        fs::create_dir(&dir).unwrap();
        // The second pass starts with files of other times and modes.
        let release = example(&dir);
        let files = write_all(&release, &dir).unwrap();
        assert_eq!(files.len(), 4);
        sums.push(fs::read_to_string(checksums::write(&dir, &files).unwrap()).unwrap());
    }
    assert_eq!(sums[0], sums[1]);
    let later = Release { epoch: EPOCH + 1, ..example(&scratch.path().join("one")) };
    let dir = scratch.path().join("two");
    let files = write_all(&later, &dir).unwrap();
    let changed = fs::read_to_string(checksums::write(&dir, &files).unwrap()).unwrap();
    let same: Vec<&str> = changed.lines().filter(|line| sums[0].contains(line)).collect();
    assert_eq!(same.len(), 1, "only the bill of materials has no time: {same:?}");
}

#[test]
fn the_debian_package_has_programs_units_settings_and_manual_pages_of_root() {
    let scratch = ScratchDir::new("dist-deb").unwrap();
    let release = example(scratch.path());
    let (stage, package) = (scratch.path().join("stage"), scratch.path().join("windlass.deb"));
    fs::create_dir(&stage).unwrap();
    debian::write(&release, &stage, &package).unwrap();

    let entries = list_package(&package);
    assert!(entries.iter().all(|(_, owner, _)| owner == "root/root"), "{entries:?}");
    let mode = |path: &str| {
        let entry = entries.iter().find(|(_, _, other)| other == path);
        entry.map(|(mode, _, _)| mode.as_str()).unwrap_or_else(|| panic!("no `{path}` in {entries:?}"))
    };
    for path in ["./usr/bin/windlass", "./usr/bin/windlass-agent"] {
        assert_eq!(mode(path), "-rwxr-xr-x");
    }
    for unit in ["server", "gateway@", "dispatch-local", "dispatch-slurm", "shim"] {
        assert_eq!(mode(&format!("./usr/lib/systemd/system/windlass-{unit}.service")), "-rw-r--r--");
    }
    assert_eq!(mode("./etc/windlass/server.env"), "-rw-------");
    assert_eq!(mode("./usr/share/man/man1/windlass-server.1.gz"), "-rw-r--r--");
    assert_eq!(mode("./usr/share/bash-completion/completions/windlass"), "-rw-r--r--");
    assert_eq!(mode("./usr/share/doc/windlass/copyright"), "-rw-r--r--");
    assert_eq!(mode("./usr/share/doc/windlass/monitoring/alerts.yml"), "-rw-r--r--");
    assert_eq!(
        (field(&package, "Version"), field(&package, "Architecture")),
        ("1.2.3".into(), "amd64".into())
    );

    let control = scratch.path().join("control");
    process::run(Command::new("dpkg-deb").arg("--control").arg(&package).arg(&control)).unwrap();
    let listed = fs::read_to_string(control.join("conffiles")).unwrap();
    let conffiles: BTreeSet<String> = listed.lines().map(|path| format!(".{path}")).collect();
    let in_etc = entries.iter().filter(|(mode, _, path)| mode.starts_with('-') && path.starts_with("./etc/"));
    assert_eq!(conffiles, in_etc.map(|(_, _, path)| path.clone()).collect());
    for script in debian::SCRIPTS {
        process::run(Command::new("sh").arg("-n").arg(control.join(script))).unwrap();
    }
}

#[test]
fn digests_and_sizes_of_the_oci_image_are_right() {
    let scratch = ScratchDir::new("dist-oci").unwrap();
    let release = example(scratch.path());
    let (stage, image) = (scratch.path().join("stage"), scratch.path().join("image.tar"));
    fs::create_dir(&stage).unwrap();
    oci::write(&release, &stage, &image).unwrap();
    let mut blobs: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    for entry in tar::Archive::new(fs::File::open(&image).unwrap()).entries().unwrap() {
        let mut entry = entry.unwrap();
        let path = entry.path().unwrap().to_string_lossy().into_owned();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).unwrap();
        blobs.insert(path, bytes);
    }
    let parse = |path: &str| -> Value { serde_json::from_slice(&blobs[path]).unwrap() };
    let digest_of = |bytes: &[u8]| {
        let file = scratch.path().join("bytes");
        fs::write(&file, bytes).unwrap();
        tree::sha256(&file).unwrap()
    };
    let path_of = |descriptor: &Value| {
        let digest = descriptor["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
        let path = format!("blobs/sha256/{digest}");
        assert_eq!(digest_of(&blobs[&path]), digest);
        assert_eq!(blobs[&path].len() as u64, descriptor["size"].as_u64().unwrap());
        path
    };
    assert_eq!(parse("oci-layout")["imageLayoutVersion"], "1.0.0");
    let manifest = parse(&path_of(&parse("index.json")["manifests"][0]));
    let config = parse(&path_of(&manifest["config"]));
    assert_eq!(config["config"]["User"], "65532:65532");
    assert_eq!(config["created"], "2023-11-14T22:13:20Z");
    let docker = parse("manifest.json");
    let mut files = Vec::new();
    for (at, layer) in manifest["layers"].as_array().unwrap().iter().enumerate() {
        let path = path_of(layer);
        assert_eq!(docker[0]["Layers"][at], path.as_str());
        let packed = scratch.path().join("layer.gz");
        fs::write(&packed, &blobs[&path]).unwrap();
        let plain = Command::new("gzip").args(["-dc"]).arg(&packed).output().unwrap().stdout;
        assert_eq!(config["rootfs"]["diff_ids"][at], format!("sha256:{}", digest_of(&plain)));
        let mut archive = tar::Archive::new(plain.as_slice());
        let paths = archive.entries().unwrap().map(|entry| entry.unwrap().path().unwrap().into_owned());
        files.extend(paths.map(|path| path.display().to_string()));
    }
    for path in
        ["usr/bin/windlass", "usr/bin/windlass-agent", "etc/passwd", "var/lib/windlass-server/", "tmp/"]
    {
        assert!(files.iter().any(|file| file == path), "no `{path}` in {files:?}");
    }
}

#[test]
fn units_keep_jobs_alive_and_name_users_that_the_package_creates() {
    let packaging = Packaging::read(&Workspace::find().unwrap()).unwrap();
    let kill_mode = |name: &str| units::value(&packaging.units[name], "KillMode");
    for name in ["server", "shim", "dispatch-local"] {
        let name = format!("windlass-{name}.service");
        assert_eq!(kill_mode(&name), Some("process"), "{name}");
        // systemd deletes a private /tmp while jobs still use it.
        assert_eq!(units::value(&packaging.units[&name], "PrivateTmp"), None, "{name}");
    }
    assert_eq!(kill_mode("windlass-dispatch-slurm.service"), Some("control-group"));
    for (name, unit) in &packaging.units {
        let Some(user) = units::value(unit, "User") else { continue };
        let directory = units::value(unit, "StateDirectory").unwrap();
        let line = format!("add_user {user} /var/lib/");
        assert!(packaging.scripts["postinst"].contains(&line), "{name}: {user}");
        assert!(packaging.sysusers.contains(&format!("u {user} ")), "{name}: {user}");
        assert!(packaging.scripts["postrm"].contains(&format!("/var/lib/{directory}")), "{name}");
    }
}
