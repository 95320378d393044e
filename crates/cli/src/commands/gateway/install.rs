//! `windlass gateway install`: installs a gateway process on a host as a permanent service.
//!
//! Uses the caller's SSH: the server needs no access to the hosts of its gateways, and has none.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use sha2::{Digest as _, Sha256};
use windlass_api::{gateways::NameRequest, operations::CreateGatewayToken};
use windlass_model::config::shell::quote;

use super::{find, serve};
use crate::{context::Context, error::CliError, exit::Exit, output};

pub(super) const EXAMPLES: &str = "\
Examples:
  windlass gateway install entry                       install it on this machine
  windlass gateway install entry root@edge --server http://windlass:3000
  windlass gateway install entry root@one root@two --server http://windlass:3000 -- --tls-listen 0.0.0.0:443
  windlass gateway install entry root@three --token-file entry.token    keep the token of other hosts";

/// Time limit for the new process to connect to the server, which usually takes seconds.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Prefix of the directory with all files of the process.
const INSTALL_DIR: &str = "/var/lib/windlass/gateway-";

/// Target hosts and SSH options.
#[derive(Debug, clap::Args)]
pub(crate) struct HostArgs {
    /// Name of the gateway
    #[arg(value_name = "GATEWAY")]
    pub(crate) name: String,
    /// Hosts in `ssh` notation, with root login; defaults to this machine
    #[arg(value_name = "HOST")]
    pub(crate) hosts: Vec<String>,
    /// Option for `ssh`, as in `ssh -o`
    #[arg(long, value_name = "OPTION")]
    pub(crate) ssh_option: Vec<String>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) hosts: HostArgs,
    /// URL of the server for the hosts; defaults to the one that this command uses
    #[arg(long, value_name = "URL")]
    pub(crate) server: Option<String>,
    /// File with the gateway's token; by default a new token is created and processes with the old one exit
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
    /// Additional arguments for `windlass gateway serve`
    #[arg(last = true, value_name = "ARGUMENT")]
    pub(crate) more: Vec<String>,
}

enum TargetHost<'a> {
    Local,
    Remote { name: &'a str, options: &'a [String] },
}

impl HostArgs {
    fn targets(&self) -> Vec<TargetHost<'_>> {
        if self.hosts.is_empty() {
            return vec![TargetHost::Local];
        }
        self.hosts.iter().map(|name| TargetHost::Remote { name, options: &self.ssh_option }).collect()
    }
}

impl TargetHost<'_> {
    /// Name of the host in messages, and its address.
    fn address(&self) -> &str {
        match self {
            Self::Local => "127.0.0.1",
            Self::Remote { name, .. } => name.rsplit('@').next().unwrap_or(name),
        }
    }

    /// Runs a script in a shell on the host and returns its output.
    fn run_script(&self, script: &str, input: Option<Stdio>) -> Result<String, CliError> {
        let mut command = match self {
            Self::Local => Command::new("sh"),
            Self::Remote { name, options } => {
                let mut command = Command::new("ssh");
                command.args(["-o", "BatchMode=yes"]);
                for option in *options {
                    command.args(["-o", option]);
                }
                command.args(["--", name, "sh"]);
                command
            }
        };
        // An SSH server passes the arguments to a shell again.
        let script = if matches!(self, Self::Local) { script.to_owned() } else { quote(script) };
        command.arg("-c").arg(script).stdin(input.unwrap_or_else(Stdio::null));
        let failed = |error| {
            CliError::from_error(&format!("failed to connect to {}", self.address()), &error)
                .hint("check that `ssh` is installed on this machine")
        };
        let message = command.output().map_err(failed)?;
        if message.status.success() {
            return Ok(String::from_utf8_lossy(&message.stdout).into_owned());
        }
        let why = String::from_utf8_lossy(&message.stderr).trim().to_owned();
        let why = if why.is_empty() { message.status.to_string() } else { why };
        Err(CliError::new(format!("failed to run a script on {}", self.address()))
            .why(why)
            .hint("check that root can log in without a prompt: `ssh HOST true`"))
    }

    /// Writes a file that only root can read.
    fn write(&self, path: &str, bytes: &[u8]) -> Result<(), CliError> {
        let failed = |error: std::io::Error| CliError::from_error("failed to transfer a file", &error);
        let (read, mut write) = std::io::pipe().map_err(failed)?;
        // Smaller than the buffer of a pipe.
        write.write_all(bytes).map_err(failed)?;
        drop(write);
        self.run_script(&format!("umask 077; cat > {}", quote(path)), Some(read.into())).map(drop)
    }

    /// Uploads this program unless the host has it already.
    fn upload_program(&self, home: &str) -> Result<(), CliError> {
        let own = std::env::current_exe()
            .map_err(|error| CliError::from_error("failed to find the path of this program", &error))?;
        let failed = |error| CliError::from_error(&format!("failed to read {}", own.display()), &error);
        let there = quote(&format!("{home}/windlass"));
        let made = format!("umask 077; mkdir -p {}; sha256sum < {there} || true", quote(home));
        let has = self.run_script(&made, None)?;
        if has.starts_with(&digest(&own).map_err(failed)?) {
            return Ok(());
        }
        let script = format!("cat > {there}.$$ && chmod 755 {there}.$$ && mv {there}.$$ {there}");
        let program = File::open(&own).map_err(failed)?;
        self.run_script(&script, Some(program.into())).map(drop)
    }
}

fn digest(path: &Path) -> std::io::Result<String> {
    let (mut file, mut hash) = (File::open(path)?, Sha256::new());
    let mut piece = vec![0; 1 << 20];
    loop {
        match file.read(&mut piece)? {
            0 => break,
            read => hash.update(&piece[..read]),
        }
    }
    Ok(hex::encode(hash.finalize()))
}

fn unit_name(name: &str) -> String {
    format!("windlass-gateway-{name}")
}

/// Renders the script that the host runs now and at every boot.
fn render_launch_script(home: &str, name: &str, server: &str, address: &str, more: &[String]) -> String {
    let state = format!("{home}/state");
    let token = format!("{home}/token");
    let program = format!("{home}/windlass");
    let words = [&program, "gateway", "serve", name, "--server", server, "--token-file", &token];
    let words = words.into_iter().chain(["--state-dir", &state, "--address", address]);
    let words: Vec<String> = words.chain(more.iter().map(String::as_str)).map(quote).collect();
    format!("#!/bin/sh\necho $$ > {}\nexec {}\n", quote(&format!("{home}/pid")), words.join(" "))
}

/// Renders a script that starts a new process next to the old one, which then exits, and waits until it listens.
fn render_start_script(home: &str, name: &str) -> String {
    let (unit, home) = (unit_name(name), quote(home));
    format!(
        r#"set -eu
cd {home}
chmod 700 run
: > log
if [ -d /run/systemd/system ]; then
  cat > /etc/systemd/system/{unit}@.service <<EOF
[Unit]
Description=windlass: gateway {name}
After=network-online.target
Wants=network-online.target

[Service]
ExecStart={home}/run
StandardOutput=append:{home}/log
StandardError=append:{home}/log
Restart=on-failure
RestartSec=1
LimitNOFILE=1048576

[Install]
WantedBy=multi-user.target
EOF
  systemctl daemon-reload
  old=$(systemctl list-unit-files --plain --no-legend '{unit}@*' | cut -d' ' -f1 | grep -v '@\.' || true)
  old="$old $(systemctl list-units --plain --no-legend '{unit}@*' | cut -d' ' -f1)"
  systemctl enable -q --now "{unit}@$(date +%s%N)"
  for one in $old; do systemctl disable -q "$one" || true; done
else
  setsid ./run >> log 2>&1 < /dev/null &
fi
tries=0
until grep -q 'is ready at' log; do
  tries=$((tries + 1))
  if [ $tries -gt 150 ] || grep -q '^error' log; then tail -n 5 log >&2; exit 1; fi
  sleep 0.1
done
"#
    )
}

fn render_stop_script(home: &str, name: &str) -> String {
    let (unit, home) = (unit_name(name), quote(home));
    format!(
        r#"if [ -d /run/systemd/system ]; then
  for one in $(systemctl list-units --plain --no-legend '{unit}@*' | cut -d' ' -f1); do
    systemctl disable -q --now "$one"
  done
  rm -f /etc/systemd/system/{unit}@.service
  systemctl daemon-reload
elif pid=$(cat {home}/pid 2> /dev/null) && tr '\0' ' ' < "/proc/$pid/cmdline" 2> /dev/null | grep -qF {home}/; then
  kill -TERM "$pid"
  while [ -e "/proc/$pid" ] && ! grep -q '^State:.Z' "/proc/$pid/status"; do sleep 0.1; done
fi
rm -rf {home}
"#
    )
}

/// Restricts the name to characters that are safe in scripts and paths.
fn check_name(name: &str) -> Result<(), CliError> {
    let is_plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
    if !name.is_empty() && name.bytes().all(is_plain) {
        return Ok(());
    }
    Err(CliError::usage("invalid gateway name: expected letters, digits, `-` and `_`, such as `entry`"))
}

pub(super) async fn install(cx: &Context, args: &Args) -> Result<Exit, CliError> {
    let name = &args.hosts.name;
    check_name(name)?;
    find(cx, name).await?;
    let hosts = args.hosts.targets();
    let server = args.server.as_deref().unwrap_or(&cx.url);
    let is_near = ["//127.", "//localhost", "//[::1]"].iter().any(|word| server.contains(word));
    if is_near && hosts.iter().any(|host| !matches!(host, TargetHost::Local)) {
        return Err(CliError::usage(format!("other hosts cannot reach the server at {server}"))
            .hint("pass `--server URL` with an address that they can reach"));
    }
    let token = match &args.token_file {
        Some(file) => serve::read_token(file)?,
        None => cx.call::<CreateGatewayToken>(&NameRequest { name: name.clone() }).await?.token,
    };
    let home = format!("{INSTALL_DIR}{name}");
    for host in &hosts {
        let address = host.address();
        output::print_message(&format!("{address}: uploading the program"));
        host.upload_program(&home)?;
        host.write(&format!("{home}/token"), token.as_bytes())?;
        let mut more = args.more.clone();
        if let Some(certificate) = &cx.certificate {
            let file = format!("{home}/server.pem");
            host.write(&file, certificate.as_bytes())?;
            // Arguments of the user come later and take precedence.
            more.splice(0..0, ["--server-cert".to_owned(), file]);
        }
        let program = render_launch_script(&home, name, server, address, &more);
        host.write(&format!("{home}/run"), program.as_bytes())?;
        host.run_script(&render_start_script(&home, name), None)?;
        output::print_message(&format!("{address}: listening"));
    }
    wait_until_connected(cx, name, &hosts).await?;
    output::print_message(&format!("`{name}` is ready; number of hosts: {}.", hosts.len()));
    Ok(Exit::Done)
}

/// Waits until a process on each host has connected to the server.
async fn wait_until_connected(cx: &Context, name: &str, hosts: &[TargetHost<'_>]) -> Result<(), CliError> {
    let since = Instant::now();
    loop {
        let gateway = find(cx, name).await?;
        let is_there = |host: &&TargetHost<'_>| {
            gateway.replicas.iter().any(|replica| replica.hostname.as_deref() == Some(host.address()))
        };
        let Some(missing) = hosts.iter().find(|host| !is_there(host)) else { return Ok(()) };
        if since.elapsed() > CONNECT_TIMEOUT {
            let address = missing.address();
            return Err(CliError::new(format!(
                "the gateway process on {address} did not connect to the server in time"
            ))
            .hint(format!(
                "check {INSTALL_DIR}{name}/log on that host; it may be unable to reach the server"
            )));
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

pub(super) fn uninstall(hosts: &HostArgs) -> Result<Exit, CliError> {
    let name = &hosts.name;
    check_name(name)?;
    for host in hosts.targets() {
        host.run_script(&render_stop_script(&format!("{INSTALL_DIR}{name}"), name), None)?;
        output::print_message(&format!("{}: removed `{name}`", host.address()));
    }
    Ok(Exit::Done)
}
