//! Repositories behind HTTP with a password and behind SSH with a key: git's own programs serve both.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use base64::Engine as _;
use parking_lot::Mutex;

const MAX_BODY: usize = 64 << 20;

/// Passes connections to `serve`, each on a separate thread, until it is dropped.
struct TestListener {
    port: u16,
    closed: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl TestListener {
    fn open(serve: impl Fn(TcpStream) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let closed = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&closed);
        let serve = Arc::new(serve);
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if ends.load(Ordering::SeqCst) {
                    break;
                }
                let (stream, serve) = (stream.unwrap(), Arc::clone(&serve));
                std::thread::spawn(move || serve(stream));
            }
        });
        Self { port, closed, thread: Some(thread) }
    }
}

impl Drop for TestListener {
    fn drop(&mut self) {
        self.closed.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// `git http-backend` below `root`, for clients that send the token.
pub(crate) struct GitHttpServer {
    listener: TestListener,
    seen: Arc<ServerObservations>,
}

#[derive(Default)]
struct ServerObservations {
    /// Locations where the token was found but must not be.
    leaks: Mutex<Vec<String>>,
    /// Number of requests with the right token.
    let_in: Mutex<u32>,
    /// Packs are held back once this is set; `stalled` is set when one is.
    stall: AtomicBool,
    stalled: AtomicBool,
    ended: AtomicBool,
}

impl GitHttpServer {
    pub(crate) fn start(root: &Path, token: &str) -> Self {
        let seen = Arc::new(ServerObservations::default());
        let (root, token, shared) = (root.to_owned(), token.to_owned(), Arc::clone(&seen));
        Self { listener: TestListener::open(move |stream| answer(stream, &root, &token, &shared)), seen }
    }

    pub(crate) fn url(&self, name: &str) -> String {
        format!("http://127.0.0.1:{}/{name}", self.listener.port)
    }

    pub(crate) fn stall(&self) {
        self.seen.stall.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_stalled(&self) -> bool {
        self.seen.stalled.load(Ordering::SeqCst)
    }

    pub(crate) fn let_in(&self) -> u32 {
        *self.seen.let_in.lock()
    }

    pub(crate) fn leaks(&self) -> Vec<String> {
        self.seen.leaks.lock().clone()
    }
}

impl Drop for GitHttpServer {
    fn drop(&mut self) {
        self.seen.ended.store(true, Ordering::SeqCst);
    }
}

fn answer(stream: TcpStream, root: &Path, token: &str, seen: &ServerObservations) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut stream = stream;
    let mut line = String::new();
    if reader.read_line(&mut line).unwrap_or(0) == 0 {
        return;
    }
    let mut words = line.split_whitespace();
    let (method, target) = (words.next().unwrap().to_owned(), words.next().unwrap().to_owned());
    let mut head = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        match line.trim_end().split_once(':') {
            Some((name, value)) => head.push((name.to_ascii_lowercase(), value.trim().to_owned())),
            None => break,
        }
    }
    let header = |name: &str| head.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
    let length: usize = header("content-length").map_or(0, |text| text.parse().unwrap());
    assert!(length < MAX_BODY && header("transfer-encoding").is_none(), "a request this front does not know");
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();

    let expected = base64::engine::general_purpose::STANDARD.encode(format!("oauth2:{token}"));
    if header("authorization") != Some(format!("Basic {expected}")) {
        let refusal = "HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Basic realm=\"git\"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        stream.write_all(refusal.as_bytes()).unwrap();
        return;
    }
    *seen.let_in.lock() += 1;
    seen.leaks.lock().extend(processes_showing(token));
    let output = backend(
        root,
        &method,
        &target,
        header("content-type"),
        header("content-encoding"),
        header("git-protocol"),
        &body,
    );
    let split = output.windows(4).position(|window| window == b"\r\n\r\n").unwrap();
    let (cgi, content) = (String::from_utf8_lossy(&output[..split]).into_owned(), &output[split + 4..]);
    let status = cgi.lines().find_map(|line| line.strip_prefix("Status: ")).unwrap_or("200 OK");
    let rest: String =
        cgi.lines().filter(|line| !line.starts_with("Status:")).map(|line| format!("{line}\r\n")).collect();
    let length = content.len();
    let _ =
        write!(stream, "HTTP/1.1 {status}\r\n{rest}Content-Length: {length}\r\nConnection: close\r\n\r\n");
    if seen.stall.load(Ordering::SeqCst)
        && body.windows(7).any(|window| window == b"command" || window == b"0009don")
        && length > 1000
    {
        let _ = stream.write_all(&content[..length / 2]);
        seen.stalled.store(true, Ordering::SeqCst);
        while !seen.ended.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(10));
        }
        return;
    }
    let _ = stream.write_all(content);
}

fn backend(
    root: &Path,
    method: &str,
    target: &str,
    kind: Option<String>,
    encoding: Option<String>,
    protocol: Option<String>,
    body: &[u8],
) -> Vec<u8> {
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let mut command = Command::new("git");
    command.args(["-c", "safe.directory=*", "http-backend"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    command.env("GIT_PROJECT_ROOT", root).env("GIT_HTTP_EXPORT_ALL", "1").env("PATH_INFO", path);
    command.env("QUERY_STRING", query).env("REQUEST_METHOD", method).env("REMOTE_ADDR", "127.0.0.1");
    command.env("CONTENT_LENGTH", body.len().to_string());
    for (name, value) in
        [("CONTENT_TYPE", kind), ("HTTP_CONTENT_ENCODING", encoding), ("GIT_PROTOCOL", protocol)]
    {
        if let Some(value) = value {
            command.env(name, value);
        }
    }
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(body).unwrap();
    child.wait_with_output().unwrap().stdout
}

/// Searches arguments and variables of all processes, as a neighbour of the job could read them.
pub(crate) fn processes_showing(secret: &str) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        for file in ["cmdline", "environ"] {
            let text = std::fs::read(entry.path().join(file)).unwrap_or_default();
            if text.windows(secret.len()).any(|window| window == secret.as_bytes()) {
                found.push(format!(
                    "{}: {}",
                    entry.path().join(file).display(),
                    String::from_utf8_lossy(&text)
                ));
            }
        }
    }
    found
}

/// An OpenSSH server that accepts one key.
pub(crate) struct GitSshServer {
    listener: TestListener,
    dir: PathBuf,
}

impl GitSshServer {
    pub(crate) fn start(dir: &Path) -> Self {
        // The server drops its privileges in this directory; Debian creates it at boot only.
        std::fs::create_dir_all("/run/sshd").unwrap();
        for name in ["host", "user", "other"] {
            let mut keygen = Command::new("ssh-keygen");
            keygen.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(dir.join(name));
            assert!(keygen.status().unwrap().success());
        }
        let at = |name: &str| dir.join(name).display().to_string();
        let settings = format!(
            "HostKey {}\nAuthorizedKeysFile {}\nStrictModes no\nUsePAM no\nPermitRootLogin yes\nAcceptEnv GIT_PROTOCOL\n",
            at("host"),
            at("user.pub")
        );
        std::fs::write(dir.join("sshd_config"), settings).unwrap();
        let config = dir.join("sshd_config");
        let listener = TestListener::open(move |stream| {
            let input = OwnedFd::from(stream.try_clone().unwrap());
            let mut command = Command::new("/usr/sbin/sshd");
            command
                .args(["-i", "-f"])
                .arg(&config)
                .stdin(input)
                .stdout(OwnedFd::from(stream))
                .stderr(Stdio::null());
            let _ = command.status();
        });
        Self { listener, dir: dir.to_owned() }
    }

    pub(crate) fn url(&self, path: &Path) -> String {
        format!("ssh://root@127.0.0.1:{}{}", self.listener.port, path.display())
    }

    pub(crate) fn key(&self, name: &str) -> String {
        std::fs::read_to_string(self.dir.join(name)).unwrap()
    }

    pub(crate) fn known_hosts_line(&self, name: &str) -> String {
        format!("[127.0.0.1]:{} {}", self.listener.port, self.key(&format!("{name}.pub")))
    }
}
