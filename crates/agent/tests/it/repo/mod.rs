//! Repositories cloned by the real git, as another user, from real servers.

mod serve;

use std::{
    fs,
    os::unix::fs::{MetadataExt as _, lchown},
    path::{Path, PathBuf},
    process::Command,
};

use parking_lot::Mutex;
use windlass_agent::runner::{
    repo::{self, RepoError, RepoRequest},
    user::Account,
    user_context::UserContext,
};
use windlass_api::agent::runner::{RepoCredentials, RepoData};
use windlass_testkit::wait::eventually_async;

use crate::support::{self, TempDir, temp_dir};

const TOKEN: &str = "canary-token-5f0c2b";
/// A user id that is not used otherwise.
const USER: u32 = 47_110;

/// A job's user with a home, and a repository to clone.
pub(crate) struct RepoFixture {
    pub(crate) scratch: TempDir,
    pub(crate) site: UserContext,
    log: Mutex<Vec<String>>,
}

impl RepoFixture {
    pub(crate) fn new(name: &str) -> Self {
        let scratch = temp_dir(name).unwrap();
        let at = |name: &str| scratch.path().join(name);
        let uid =
            if rustix::process::geteuid().is_root() { USER } else { rustix::process::geteuid().as_raw() };
        for dir in ["home", "work", "served"] {
            fs::create_dir(at(dir)).unwrap();
        }
        for dir in ["home", "work", "served"] {
            lchown(at(dir), Some(uid), Some(uid)).unwrap();
        }
        fs::write(at("served/gitconfig"), "[safe]\n\tdirectory = *\n").unwrap();
        // The other user may lack access to the build directory of the tests.
        fs::hard_link(support::agent(), at("agent"))
            .or_else(|_| fs::copy(support::agent(), at("agent")).map(drop))
            .unwrap();
        let account = Account {
            uid,
            gid: uid,
            groups: vec![uid],
            home: at("home"),
            name: "job".into(),
            ..Account::root()
        };
        let mut site = UserContext::new(account, at("work"));
        site.agent = at("agent");
        Self { scratch, site, log: Mutex::default() }
    }

    pub(crate) fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn git(&self, dir: &Path, arguments: &[&str]) -> String {
        let settings = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "protocol.file.allow=always"];
        let mut command = Command::new("git");
        command.args(settings).args(arguments).current_dir(dir);
        let output = command.env("GIT_CONFIG_GLOBAL", self.at("served/gitconfig")).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    /// Creates `served/main.git`: two commits on `main`, one more on `side`, and its work tree in `source`.
    fn create_repository(&self) -> PathBuf {
        let source = self.at("source");
        fs::create_dir(&source).unwrap();
        self.git(&source, &["init", "-q", "-b", "main"]);
        fs::write(source.join("a"), "one\n").unwrap();
        fs::write(source.join("gone"), "to be deleted\n").unwrap();
        fs::write(source.join("image"), [0, 159, 146, 150, 255, 0, 1]).unwrap();
        self.git(&source, &["add", "."]);
        self.git(&source, &["commit", "-qm", "one"]);
        fs::write(source.join("a"), "two\n").unwrap();
        self.git(&source, &["commit", "-qam", "two"]);
        self.git(&source, &["checkout", "-q", "-b", "side", "HEAD~1"]);
        fs::write(source.join("a"), "side\n").unwrap();
        self.git(&source, &["commit", "-qam", "side"]);
        self.git(&source, &["checkout", "-q", "main"]);
        self.publish("source", "main.git")
    }

    fn publish(&self, from: &str, name: &str) -> PathBuf {
        let served = self.at("served").join(name);
        self.git(&self.at(from), &["clone", "-q", "--bare", ".", served.to_str().unwrap()]);
        self.git(&served, &["config", "uploadpack.allowAnySHA1InWant", "true"]);
        self.git(&served, &["config", "http.receivepack", "false"]);
        self.chown_to_job_user(&served);
        served
    }

    /// Assigns a repository to the job's user: git refuses those of other users.
    fn chown_to_job_user(&self, path: &Path) {
        let status =
            Command::new("chown").arg("-R").arg(self.site.account.uid.to_string()).arg(path).status();
        assert!(status.unwrap().success());
    }

    async fn prepare(&self, wanted: &RepoRequest<'_>) -> Result<(), RepoError> {
        repo::prepare(&self.site, wanted, &|line| self.log.lock().push(line.to_owned())).await
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.at("work").join(name)).unwrap()
    }

    /// Checks that the secret is neither in any file nor in the log.
    #[track_caller]
    fn assert_nowhere(&self, secret: &str) {
        let grep = Command::new("grep")
            .args(["-rlF", "--", secret])
            .args([self.at("work"), self.at("home")])
            .output();
        assert_eq!(String::from_utf8(grep.unwrap().stdout).unwrap(), "");
        assert_eq!(serve::processes_showing(secret), Vec::<String>::new());
        assert!(!self.log.lock().iter().any(|line| line.contains(secret)));
    }

    #[track_caller]
    fn assert_nothing_left(&self, dir: &str) {
        assert!(!self.at("work").join(dir).exists(), "{:?}", list_dir(&self.at("work")));
        assert_eq!(list_dir(&self.at("work")), Vec::<String>::new());
    }
}

fn list_dir(dir: &Path) -> Vec<String> {
    fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn remote(branch: Option<&str>, hash: Option<&str>) -> RepoData {
    RepoData::Remote {
        repo_name: None,
        repo_branch: branch.map(Into::into),
        repo_hash: hash.map(Into::into),
        repo_config_name: Some("Jo Job".into()),
        repo_config_email: Some("jo@example.org".into()),
    }
}

fn credentials(url: &str, token: Option<&str>, key: Option<&str>) -> RepoCredentials {
    RepoCredentials {
        clone_url: url.into(),
        private_key: key.map(Into::into),
        oauth_token: token.map(Into::into),
    }
}

fn repo_request<'a>(data: &'a RepoData, credentials: &'a RepoCredentials) -> RepoRequest<'a> {
    let (data, credentials) = (Some(data), Some(credentials));
    RepoRequest {
        data,
        credentials,
        dir: "repo",
        exists_action: None,
        single_branch: false,
        code: None,
        any_url: true,
    }
}

#[tokio::test]
async fn x3_a_token_reaches_git_and_nothing_else() {
    let ground = RepoFixture::new("repo-token");
    ground.create_repository();
    let http = serve::GitHttpServer::start(&ground.at("served"), TOKEN);
    let credentials = credentials(&http.url("main.git"), Some(TOKEN), None);
    ground.prepare(&repo_request(&remote(Some("main"), None), &credentials)).await.unwrap();

    assert_eq!(ground.read("repo/a"), "two\n");
    assert!(http.let_in() > 0);
    assert_eq!(http.leaks(), Vec::<String>::new());
    ground.assert_nowhere(TOKEN);
    let config = ground.read("repo/.git/config");
    assert!(config.contains(&format!("url = {}", http.url("main.git"))), "{config}");
    assert!(config.contains("name = Jo Job") && config.contains("email = jo@example.org"), "{config}");
    assert!(!config.contains("hooksPath") && !config.contains("credential"), "{config}");
    for path in ["repo", "repo/a", "repo/.git/config"] {
        assert_eq!(
            fs::metadata(ground.at("work").join(path)).unwrap().uid(),
            ground.site.account.uid,
            "{path}"
        );
    }
    assert_eq!(list_dir(&ground.at("work/repo")).iter().filter(|name| name.contains("stage")).count(), 0);
}

#[tokio::test]
async fn a_password_is_removed_from_the_repository_url() {
    let ground = RepoFixture::new("repo-login");
    ground.create_repository();
    let http = serve::GitHttpServer::start(&ground.at("served"), TOKEN);
    let url = http.url("main.git").replace("http://", &format!("http://oauth2:{TOKEN}@"));
    ground.prepare(&repo_request(&remote(None, None), &credentials(&url, None, None))).await.unwrap();
    assert_eq!(ground.read("repo/a"), "two\n");
    assert_eq!(http.leaks(), Vec::<String>::new());
    ground.assert_nowhere(TOKEN);
}

#[tokio::test]
async fn a_wrong_token_is_reported_and_leaves_no_files() {
    let ground = RepoFixture::new("repo-wrong");
    ground.create_repository();
    let http = serve::GitHttpServer::start(&ground.at("served"), "another");
    let credentials = credentials(&http.url("main.git"), Some(TOKEN), None);
    let error = ground.prepare(&repo_request(&remote(None, None), &credentials)).await.unwrap_err();
    assert!(
        error.to_string().starts_with("failed to clone the repository: git ended with exit status: 128"),
        "{error}"
    );
    assert_eq!(
        error.hint(),
        Some("hint: check the repository's credentials: they are missing, wrong or expired")
    );
    assert!(!error.to_string().contains(TOKEN));
    ground.assert_nothing_left("repo");
}

#[tokio::test]
async fn x3_cloning_with_a_private_key_needs_no_ssh_client_and_no_key_file() {
    let ground = RepoFixture::new("repo-key");
    let served = ground.create_repository();
    let dir = ground.at("sshd");
    fs::create_dir(&dir).unwrap();
    let sshd = serve::GitSshServer::start(&dir);
    // The server's git checks the owner of the repository.
    lchown(&served, Some(0), Some(0)).unwrap();
    let key = sshd.key("user");
    let credentials_ = credentials(&sshd.url(&served), None, Some(key.trim_end()));
    ground.prepare(&repo_request(&remote(Some("side"), None), &credentials_)).await.unwrap();
    assert_eq!(ground.read("repo/a"), "side\n");
    ground.assert_nowhere(key.lines().nth(2).unwrap());

    let other = credentials(&sshd.url(&served), None, Some(&sshd.key("other")));
    let data = remote(None, None);
    let elsewhere = RepoRequest { dir: "elsewhere", ..repo_request(&data, &other) };
    let error = ground.prepare(&elsewhere).await.unwrap_err();
    assert!(error.to_string().contains("Permission denied"), "{error}");

    fs::create_dir(ground.at("home/.ssh")).unwrap();
    fs::write(ground.at("home/.ssh/known_hosts"), sshd.known_hosts_line("other")).unwrap();
    let elsewhere = RepoRequest { dir: "elsewhere", ..repo_request(&data, &credentials_) };
    let error = ground.prepare(&elsewhere).await.unwrap_err();
    assert!(error.to_string().contains("the key of host 127.0.0.1 does not match the one in"), "{error}");
    fs::write(ground.at("home/.ssh/known_hosts"), sshd.known_hosts_line("host")).unwrap();
    ground.prepare(&elsewhere).await.unwrap();
}

#[tokio::test]
async fn a_commit_is_checked_out_on_its_branch_or_detached() {
    let ground = RepoFixture::new("repo-hash");
    let served = ground.create_repository();
    let first = ground.git(&ground.at("source"), &["rev-parse", "HEAD~1"]);
    let side = ground.git(&ground.at("source"), &["rev-parse", "side"]);
    let url = credentials(&format!("file://{}", served.display()), None, None);
    let head = |dir: &str| fs::read_to_string(ground.at("work").join(dir).join(".git/HEAD")).unwrap();

    let data = remote(Some("main"), Some(&first));
    ground.prepare(&RepoRequest { dir: "one", ..repo_request(&data, &url) }).await.unwrap();
    assert_eq!((ground.read("one/a").as_str(), head("one").as_str()), ("one\n", "ref: refs/heads/main\n"));

    // A single branch does not include the commit of the other: it is requested by its hash.
    let data = remote(Some("main"), Some(&side));
    ground
        .prepare(&RepoRequest { dir: "two", single_branch: true, ..repo_request(&data, &url) })
        .await
        .unwrap();
    assert_eq!(ground.read("two/a"), "side\n");
    assert!(!ground.at("work/two/.git/refs/remotes/origin/side").exists());

    let data = remote(None, Some(&first));
    ground.prepare(&RepoRequest { dir: "three", ..repo_request(&data, &url) }).await.unwrap();
    assert_eq!((ground.read("three/a").as_str(), head("three").trim()), ("one\n", first.as_str()));

    let data = remote(None, Some(&"12ab".repeat(10)));
    let error = ground.prepare(&RepoRequest { dir: "four", ..repo_request(&data, &url) }).await.unwrap_err();
    assert!(error.to_string().starts_with("failed to fetch the commit"), "{error}");
    let data = remote(Some("nowhere"), None);
    ground.prepare(&RepoRequest { dir: "five", ..repo_request(&data, &url) }).await.unwrap_err();
    let mut there = list_dir(&ground.at("work"));
    there.sort();
    assert_eq!(there, ["one", "three", "two"]);
}

#[tokio::test]
async fn changes_with_binary_files_and_deletions_are_applied() {
    let ground = RepoFixture::new("repo-diff");
    let served = ground.create_repository();
    let source = ground.at("source");
    fs::write(source.join("a"), "changed\n").unwrap();
    fs::write(source.join("image"), [0, 1, 2, 255, 254, 0, 0, 9]).unwrap();
    fs::write(source.join("new"), "brand new\n").unwrap();
    fs::remove_file(source.join("gone")).unwrap();
    ground.git(&source, &["add", "-A"]);
    let hash = ground.git(&source, &["rev-parse", "HEAD"]);
    let diff = Command::new("git")
        .args(["diff", "--binary", "--cached", "HEAD"])
        .current_dir(&source)
        .output()
        .unwrap();
    let code = ground.at("code");
    fs::write(&code, diff.stdout).unwrap();
    let url = credentials(&format!("file://{}", served.display()), None, None);
    let data = remote(Some("main"), Some(&hash));
    ground.prepare(&RepoRequest { code: Some(&code), ..repo_request(&data, &url) }).await.unwrap();
    assert_eq!((ground.read("repo/a"), ground.read("repo/new")), ("changed\n".into(), "brand new\n".into()));
    assert_eq!(fs::read(ground.at("work/repo/image")).unwrap(), [0, 1, 2, 255, 254, 0, 0, 9]);
    assert!(!ground.at("work/repo/gone").exists());

    fs::write(&code, "diff --git a/x b/../../out\n--- /dev/null\n+++ b/../../out\n@@ -0,0 +1 @@\n+x\n")
        .unwrap();
    let outside = RepoRequest { code: Some(&code), dir: "outside", ..repo_request(&data, &url) };
    let error = ground.prepare(&outside).await.unwrap_err();
    assert!(error.to_string().starts_with("failed to apply the changes"), "{error}");
    assert!(!ground.at("out").exists() && !ground.at("work/outside").exists());
}

#[tokio::test]
async fn submodules_are_cloned_and_hooks_never_run() {
    let ground = RepoFixture::new("repo-sub");
    let served = ground.create_repository();
    let outer = ground.at("outer");
    fs::create_dir(&outer).unwrap();
    ground.git(&outer, &["init", "-q", "-b", "main"]);
    let inner = format!("file://{}", served.display());
    ground.git(&outer, &["submodule", "add", "-q", &inner, "sub"]);
    ground.git(&outer, &["commit", "-qm", "with a submodule"]);
    let outer = ground.publish("outer", "outer.git");
    // A hook of the user's template would run at the first checkout.
    let hooks = ground.at("home/template/hooks");
    fs::create_dir_all(&hooks).unwrap();
    fs::write(hooks.join("post-checkout"), format!("#!/bin/sh\ntouch {}\n", ground.at("home/ran").display()))
        .unwrap();
    fs::set_permissions(hooks.join("post-checkout"), std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .unwrap();
    let config = format!("[init]\n\ttemplateDir = {}\n", ground.at("home/template").display());
    fs::write(ground.at("home/.gitconfig"), config).unwrap();
    ground.chown_to_job_user(&ground.at("home"));

    let url = credentials(&format!("file://{}", outer.display()), None, None);
    ground.prepare(&repo_request(&remote(Some("main"), None), &url)).await.unwrap();
    assert_eq!(ground.read("repo/sub/a"), "two\n");
    let status = ground.git(&ground.at("work/repo"), &["-c", "safe.directory=*", "status", "--porcelain"]);
    assert_eq!(status, "", "the moved submodule is whole");
    assert!(ground.at("work/repo/.git/hooks/post-checkout").exists(), "the template was used");
    assert!(!ground.at("home/ran").exists(), "a hook ran");
}

#[tokio::test]
async fn a_submodule_on_another_host_does_not_get_the_token() {
    let ground = RepoFixture::new("repo-foreign");
    ground.create_repository();
    let (ours, theirs) = (
        serve::GitHttpServer::start(&ground.at("served"), TOKEN),
        serve::GitHttpServer::start(&ground.at("served"), TOKEN),
    );
    let outer = ground.at("outer");
    fs::create_dir(&outer).unwrap();
    ground.git(&outer, &["init", "-q", "-b", "main"]);
    let inner = format!("file://{}", ground.at("served/main.git").display());
    ground.git(&outer, &["submodule", "add", "-q", &inner, "sub"]);
    ground.git(&outer, &["config", "-f", ".gitmodules", "submodule.sub.url", &theirs.url("main.git")]);
    ground.git(&outer, &["commit", "-qam", "with a submodule elsewhere"]);
    ground.publish("outer", "outer.git");
    let url = credentials(&ours.url("outer.git"), Some(TOKEN), None);
    let error = ground.prepare(&repo_request(&remote(Some("main"), None), &url)).await.unwrap_err();
    assert!(error.to_string().starts_with("failed to fetch the submodules"), "{error}");
    assert!(ours.let_in() > 0);
    assert_eq!(theirs.let_in(), 0);
    ground.assert_nothing_left("repo");
}

#[tokio::test]
async fn a_stop_during_the_clone_leaves_neither_files_nor_processes() {
    let ground = RepoFixture::new("repo-stop");
    ground.create_repository();
    let http = serve::GitHttpServer::start(&ground.at("served"), TOKEN);
    http.stall();
    let credentials = credentials(&http.url("main.git"), Some(TOKEN), None);
    let data = remote(None, None);
    let wanted = repo_request(&data, &credentials);
    let reached = eventually_async("the clone begins", async || http.is_stalled().then_some(()));
    tokio::select! {
        ended = ground.prepare(&wanted) => panic!("the clone ended: {ended:?}"),
        () = reached => {}
    }
    ground.assert_nothing_left("repo");
    let mine = || {
        let status = |entry: fs::DirEntry| fs::read_to_string(entry.path().join("environ")).ok();
        let home = format!("HOME={}", ground.at("home").display());
        fs::read_dir("/proc").unwrap().flatten().filter_map(status).any(|text| text.contains(&home))
    };
    eventually_async("git ends", async || (!mine()).then_some(())).await;
}

#[tokio::test]
async fn a_non_empty_directory_is_kept_or_refused_as_configured() {
    let ground = RepoFixture::new("repo-exists");
    let served = ground.create_repository();
    let url = credentials(&format!("file://{}", served.display()), None, None);
    let data = remote(None, None);
    fs::create_dir_all(ground.at("work/repo/lost+found")).unwrap();
    ground.chown_to_job_user(&ground.at("work"));
    ground.prepare(&RepoRequest { exists_action: Some("error"), ..repo_request(&data, &url) }).await.unwrap();
    assert_eq!(ground.read("repo/a"), "two\n", "a lone lost+found counts as empty");

    let error = ground
        .prepare(&RepoRequest { exists_action: Some("error"), ..repo_request(&data, &url) })
        .await
        .unwrap_err();
    assert!(matches!(error, RepoError::Exists { .. }), "{error}");
    fs::write(ground.at("work/repo/a"), "mine").unwrap();
    for action in [None, Some("skip")] {
        ground.prepare(&RepoRequest { exists_action: action, ..repo_request(&data, &url) }).await.unwrap();
        assert_eq!(ground.read("repo/a"), "mine");
    }
    let error = ground
        .prepare(&RepoRequest { exists_action: Some("burn"), ..repo_request(&data, &url) })
        .await
        .unwrap_err();
    assert!(matches!(error, RepoError::UnknownAction { .. }), "{error}");
}

#[tokio::test]
async fn urls_that_are_not_remote_are_refused_by_default() {
    let ground = RepoFixture::new("repo-url");
    let served = ground.create_repository();
    let data = remote(None, None);
    for url in [
        format!("file://{}", served.display()),
        served.display().to_string(),
        "ext::true".into(),
        "--x".into(),
    ] {
        let credentials = credentials(&url, None, None);
        let error = ground
            .prepare(&RepoRequest { any_url: false, ..repo_request(&data, &credentials) })
            .await
            .unwrap_err();
        assert!(matches!(error, RepoError::Url(_)), "{url}: {error}");
    }
    ground.assert_nothing_left("repo");
}

#[tokio::test]
async fn code_without_a_remote_is_unpacked_and_a_hostile_archive_leaves_nothing() {
    let ground = RepoFixture::new("repo-virtual");
    let code = ground.at("code");
    let mut builder = tar::Builder::new(fs::File::create(&code).unwrap());
    let mut header = tar::Header::new_gnu();
    header.set_mode(0o640);
    header.set_size(3);
    builder.append_data(&mut header, "src/main.py", &b"hey"[..]).unwrap();
    builder.into_inner().unwrap();
    let data = RepoData::Virtual {};
    let base = RepoRequest {
        data: Some(&data),
        credentials: None,
        dir: ".",
        exists_action: None,
        single_branch: true,
        code: Some(&code),
        any_url: false,
    };
    ground.prepare(&base).await.unwrap();
    assert_eq!(ground.read("src/main.py"), "hey");
    assert_eq!(fs::metadata(ground.at("work/src/main.py")).unwrap().uid(), ground.site.account.uid);

    let mut builder = tar::Builder::new(fs::File::create(&code).unwrap());
    let mut header = tar::Header::new_gnu();
    header.set_mode(0o644);
    header.set_size(3);
    builder.append_data(&mut header, "fine", &b"hey"[..]).unwrap();
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(tar::EntryType::Symlink);
    header.set_mode(0o777);
    header.set_size(0);
    builder.append_link(&mut header, "evil", "/etc").unwrap();
    builder.into_inner().unwrap();
    let error = ground.prepare(&RepoRequest { dir: "~/code", ..base }).await.unwrap_err();
    let RepoError::Unpack(source) = &error else { panic!("{error}") };
    assert!(source.to_string().contains("`evil`: the link target `/etc` is outside the archive"), "{source}");
    assert_eq!(list_dir(&ground.at("home")), Vec::<String>::new());

    ground.prepare(&RepoRequest { data: None, ..base }).await.unwrap();
    fs::write(&code, "").unwrap();
    ground.prepare(&RepoRequest { dir: "~/none", ..base }).await.unwrap();
    assert!(!ground.at("home/none").exists(), "no code, no directory");
}

#[tokio::test]
async fn a_missing_git_in_the_image_is_reported_with_a_hint() {
    let mut ground = RepoFixture::new("repo-bare");
    ground.create_repository();
    ground.site.path = ground.at("home").into();
    let data = remote(None, None);
    let https = credentials("https://example.org/r", None, None);
    let error = ground.prepare(&repo_request(&data, &https)).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "failed to set up the repository: neither the image nor the instance has git"
    );
    assert_eq!(
        error.hint(),
        Some(
            "hint: install git on the instance or in the image, or send the directory with `files` instead of `repos`"
        )
    );
    let ssh = credentials("git@example.org:r", None, None);
    let error = ground.prepare(&repo_request(&data, &ssh)).await.unwrap_err();
    assert!(matches!(error, RepoError::NoSsh), "{error}");
    ground.assert_nothing_left("repo");
}
