//! `windlass-agent relay`: connects standard input and output to the shim's socket.
//!
//! The host's SSH server starts it for gateways, as the user of the account and instead of any program that they
//! request (`shim/gateway_key.rs`).

use std::{
    fs::File,
    io::{self, Read, Write},
    net::Shutdown,
    os::{fd::AsFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    process::ExitCode,
    thread,
};

const CHUNK_BYTES: usize = 64 * 1024;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Socket of the shim
    #[arg(value_name = "SOCKET")]
    socket: PathBuf,
}

pub fn main(args: &Args) -> ExitCode {
    match relay(&args.socket) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "error: failed to relay to {}: {error}", args.socket.display());
            ExitCode::FAILURE
        }
    }
}

/// Copies bytes in both directions, until the shim ends its side.
fn relay(socket: &Path) -> io::Result<()> {
    let shim = UnixStream::connect(socket)?;
    // Files have no buffers, unlike the handles of the standard library.
    let mut input = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut output = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    let mut to_shim = shim.try_clone()?;
    thread::Builder::new().spawn(move || {
        let _ = copy(&mut input, &mut to_shim);
        let _ = to_shim.shutdown(Shutdown::Write);
    })?;
    copy(&mut &shim, &mut output)
}

/// Writes every chunk as soon as it was read. The standard library's `copy` lets the kernel move the bytes, which waits
/// for more of them.
fn copy(from: &mut impl Read, to: &mut impl Write) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => to.write_all(&buffer[..count])?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
