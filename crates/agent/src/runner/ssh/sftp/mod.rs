//! File transfer over a channel: version 3 of the protocol that `sftp`, `scp`, `sshfs` and editors use.
//!
//! Runs as a separate process (`windlass-agent runner sftp`) with the session's user, so that the kernel decides what
//! may be read, and a transfer does not use the runner's memory. Why not russh-sftp? It treats paths as UTF-8 and
//! answers a name that is not UTF-8 under the wrong request number, and it loops without end if its stream fails in
//! another way than by closing.

mod file_server;
mod packet;

use std::{
    fs::File,
    io::{self, BufReader, BufWriter, Read, Write},
    os::fd::AsFd as _,
    process::ExitCode,
};

use self::{file_server::FileServer, packet::PACKET_MAX};

/// Serves requests from standard input to standard output until the end of input.
pub(super) fn serve() -> ExitCode {
    let own = |fd: std::os::fd::BorrowedFd<'_>| fd.try_clone_to_owned().map(File::from);
    let streams = own(io::stdin().as_fd()).and_then(|input| Ok((input, own(io::stdout().as_fd())?)));
    match streams.and_then(|(input, output)| serve_streams(input, output)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn serve_streams(input: impl Read, output: impl Write) -> io::Result<()> {
    let mut input = BufReader::with_capacity(PACKET_MAX, input);
    let mut output = BufWriter::with_capacity(PACKET_MAX, output);
    let mut files = FileServer::default();
    let mut packet = Vec::new();
    while read_packet(&mut input, &mut packet)? {
        output.write_all(&files.answer(&packet))?;
        // Clients send many requests at once; responses are flushed together when no more input is buffered.
        if input.buffer().is_empty() {
            output.flush()?;
        }
    }
    output.flush()
}

/// Reads one packet. Returns false at the end of the input.
fn read_packet(input: &mut impl Read, packet: &mut Vec<u8>) -> io::Result<bool> {
    let mut count = [0u8; 4];
    match input.read_exact(&mut count) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
        other => other?,
    }
    let count = u32::from_be_bytes(count) as usize;
    if count == 0 || count > PACKET_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    packet.resize(count, 0);
    input.read_exact(packet)?;
    Ok(true)
}
