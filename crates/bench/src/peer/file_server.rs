//! An HTTP server that answers every request with the agent.

use std::{net::Ipv4Addr, path::Path, sync::Arc};

use anyhow::Result;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};

const REQUEST_MAX: usize = 8 << 10;

pub(super) struct FileServer {
    url: String,
    task: JoinHandle<()>,
}

impl FileServer {
    pub(super) async fn open(file: &Path, here: Ipv4Addr) -> Result<Self> {
        let bytes: Arc<[u8]> = std::fs::read(file)?.into();
        let listener = TcpListener::bind((here, 0)).await?;
        let url = format!("http://{}/windlass-agent", listener.local_addr()?);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let bytes = Arc::clone(&bytes);
                tokio::spawn(async move { send_file(stream, &bytes).await.ok() });
            }
        });
        Ok(Self { url, task })
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }
}

impl Drop for FileServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn send_file(mut stream: TcpStream, bytes: &[u8]) -> Result<()> {
    let mut request = Vec::new();
    while !request.windows(4).any(|end| end == b"\r\n\r\n") && request.len() < REQUEST_MAX {
        if stream.read_buf(&mut request).await? == 0 {
            return Ok(());
        }
    }
    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", bytes.len());
    stream.write_all(head.as_bytes()).await?;
    if !request.starts_with(b"HEAD") {
        stream.write_all(bytes).await?;
    }
    stream.shutdown().await?;
    Ok(())
}
