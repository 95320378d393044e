//! The spool over real sockets: many tailers that connect, disconnect and stall, readers by offset, pulls by time.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    Router,
    extract::{Query, State},
    response::Response,
    routing::get,
};
use base64::{Engine, engine::general_purpose::STANDARD};
use futures_util::{StreamExt, future::join_all};
use http_body_util::{BodyExt, Empty};
use hyper::{Request, body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use tokio::{
    net::{TcpListener, TcpSocket, TcpStream},
    sync::oneshot,
    time::timeout,
};
use tokio_tungstenite::{WebSocketStream, client_async, tungstenite::Message};
use tokio_util::sync::CancellationToken;

use windlass_agent::{
    safe_open::DirHandle,
    spool::{Reader, Spool, Stream, StreamSource, Timestamps, Watcher, Writer, http},
};
use windlass_api::agent::{LOG_COMPLETE_HEADER, LOG_END_HEADER, runner::PullResponse};
use windlass_testkit::rng::Rng;
use windlass_testkit::wait::TIMEOUT;

use crate::support::{TempDir, temp_dir};

/// A spool behind the runner's handlers.
struct SpoolServer {
    spool: Arc<Spool>,
    address: SocketAddr,
    dir: TempDir,
}

#[derive(Deserialize)]
struct PullQuery {
    timestamp: i64,
}

async fn pull(State(spool): State<Arc<Spool>>, Query(after): Query<PullQuery>) -> Response {
    http::pull(&spool, after.timestamp, 0, || {
        let ended = spool.writer(Stream::Job).position().complete;
        let state = serde_json::json!({"state": "done", "timestamp": 1, "exit_status": 0});
        if ended { vec![serde_json::from_value(state).unwrap()] } else { Vec::new() }
    })
    .await
}

impl SpoolServer {
    async fn new(name: &str) -> Self {
        let dir = temp_dir(name).unwrap();
        let spool = Spool::open(dir.path(), Timestamps::new()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let pull = Router::new().route("/api/pull", get(pull)).with_state(Arc::clone(&spool));
        let routes = http::routes(Arc::clone(&spool)).merge(pull);
        tokio::spawn(async move { axum::serve(listener, routes).await });
        Self { spool, address, dir }
    }

    fn writer(&self) -> Writer {
        self.spool.writer(Stream::Job).clone()
    }

    async fn call(&self, method: &str, path: &str) -> (u16, hyper::HeaderMap, Bytes) {
        let stream = TcpStream::connect(self.address).await.unwrap();
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let request = Request::builder().method(method).uri(path).header("host", "runner");
        let response = sender.send_request(request.body(Empty::<Bytes>::new()).unwrap()).await.unwrap();
        let (head, body) = response.into_parts();
        (head.status.as_u16(), head.headers, body.collect().await.unwrap().to_bytes())
    }

    async fn tail(&self, query: &str) -> WebSocketStream<TcpStream> {
        self.tail_over(query, TcpSocket::new_v4().unwrap()).await
    }

    async fn tail_over(&self, query: &str, socket: TcpSocket) -> WebSocketStream<TcpStream> {
        let stream = socket.connect(self.address).await.unwrap();
        client_async(format!("ws://runner/logs_ws{query}"), stream).await.unwrap().0
    }
}

fn header(headers: &hyper::HeaderMap, name: &str) -> String {
    headers[name].to_str().unwrap().to_owned()
}

/// Returns everything that a tailer receives until the server closes the connection properly.
async fn read_to_close(mut socket: WebSocketStream<TcpStream>, between: Duration) -> (Vec<u8>, String) {
    let mut hash = Sha256::new();
    let mut first = Vec::new();
    loop {
        match timeout(TIMEOUT, socket.next()).await.expect("the tailer starves") {
            Some(Ok(Message::Binary(bytes))) => {
                hash.update(&bytes);
                if first.len() < 100 {
                    first.extend_from_slice(&bytes);
                }
                tokio::time::sleep(between).await;
            }
            Some(Ok(Message::Close(frame))) => {
                assert_eq!(u16::from(frame.unwrap().code), 1000);
                return (first, hex::encode(hash.finalize()));
            }
            Some(Ok(_)) => {}
            other => panic!("the stream broke: {other:?}"),
        }
    }
}

const WRITES: usize = 25_000;
/// Interval of the writes of a job that makes 5,000 a second.
const WRITE_INTERVAL: Duration = Duration::from_micros(200);

/// Runs a job that writes in a separate thread, often, and then ends. Returns the hash of all output.
fn job(writer: Writer, half: oneshot::Sender<()>) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let (mut noise, mut hash, mut half) = (Rng::new(1), Sha256::new(), Some(half));
        let start = Instant::now();
        for write in 0..WRITES {
            // Some large writes, so that the output does not fit into the sockets of clients that do not read.
            let size = if write % 250 == 0 { 80_000 } else { 1 + (noise.draw() % 200) as usize };
            let bytes = noise.bytes(size);
            hash.update(&bytes);
            writer.append(&bytes).unwrap();
            if write == WRITES / 2 {
                half.take().unwrap().send(()).unwrap();
            }
            // The rate is the load; nothing depends on it being met.
            std::thread::sleep(
                (start + WRITE_INTERVAL * write as u32).saturating_duration_since(Instant::now()),
            );
        }
        writer.finish().unwrap();
        hex::encode(hash.finalize())
    })
}

/// Reads by offset, with long polls, until the end.
async fn by_offset(served: &SpoolServer) -> String {
    let (mut hash, mut offset) = (Sha256::new(), 0);
    loop {
        let path = format!("/api/logs?stream=job&offset={offset}&limit=100000&wait_ms=20000");
        let (status, headers, body) = served.call("GET", &path).await;
        assert_eq!(status, 200);
        hash.update(&body);
        offset += body.len() as u64;
        if header(&headers, LOG_COMPLETE_HEADER) == "true"
            && header(&headers, LOG_END_HEADER) == offset.to_string()
        {
            return hex::encode(hash.finalize());
        }
    }
}

/// Pulls by time, as a dstack server would.
async fn by_time(served: &SpoolServer) -> usize {
    let (mut cursor, mut got) = (0, 0);
    loop {
        let (status, _, body) = served.call("GET", &format!("/api/pull?timestamp={cursor}")).await;
        assert_eq!(status, 200);
        let pull: PullResponse = serde_json::from_slice(&body).unwrap();
        for event in &pull.job_logs {
            assert!(event.timestamp > cursor && event.timestamp <= pull.last_updated);
            got += STANDARD.decode(&event.message).unwrap().len();
        }
        cursor = pull.last_updated;
        if !pull.has_more {
            return got;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn o4_f31_tailers_see_the_same_bytes_while_others_join_leave_and_stall() {
    let served = SpoolServer::new("tailers").await;
    let (half, at_half) = oneshot::channel();
    let small = TcpSocket::new_v4().unwrap();
    small.set_recv_buffer_size(4096).unwrap();
    let never_reads = served.tail_over("", small).await;
    let slow = served.tail("?offset=0").await;
    let steady = served.tail("").await;
    let thread = job(served.writer(), half);

    let leavers = async {
        for _ in 0..2 {
            let mut socket = served.tail("").await;
            socket.next().await.unwrap().unwrap();
            drop(socket);
        }
        at_half.await.unwrap();
        let mut socket = served.tail("").await;
        socket.next().await.unwrap().unwrap();
        socket.close(None).await.unwrap();
    };
    let crowd = async {
        let near = served.spool.source(Stream::Job).wait(8_000_000, TIMEOUT).await.unwrap();
        assert!(near.end > 8_000_000);
        let sockets = join_all((0..50).map(|_| served.tail(""))).await;
        join_all(sockets.into_iter().map(|socket| read_to_close(socket, Duration::ZERO))).await
    };
    let started = Instant::now();
    let (offsets, pulled, steady, slow, crowd, ()) = tokio::join!(
        by_offset(&served),
        by_time(&served),
        read_to_close(steady, Duration::ZERO),
        read_to_close(slow, Duration::from_millis(5)),
        crowd,
        leavers,
    );
    let expected = tokio::task::spawn_blocking(|| thread.join().unwrap()).await.unwrap();
    assert!(started.elapsed() < TIMEOUT);
    assert_eq!(offsets, expected);
    assert_eq!(steady.1, expected);
    assert_eq!(slow.1, expected);
    assert!(crowd.iter().all(|(_, hash)| *hash == expected), "one of the crowd differs");
    let end = served.spool.source(Stream::Job).position().await.unwrap().end;
    assert!(pulled > 0 && pulled as u64 <= end, "escape codes are taken out of noise, nothing is added");

    // The tailer that never read is served from disk when it resumes, long after the end.
    let alone = async {
        while served.spool.readers().tailers() > 1 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(TIMEOUT, alone).await.unwrap();
    assert_eq!(served.spool.readers().tailers(), 1, "its bytes do not fit in its sockets");
    assert_eq!(read_to_close(never_reads, Duration::ZERO).await.1, expected);
    timeout(TIMEOUT, served.spool.all_read()).await.unwrap();
}

#[tokio::test]
async fn o7_the_spool_reports_when_the_server_and_the_tailers_have_read_everything() {
    let served = SpoolServer::new("read").await;
    served.writer().append(b"twelve bytes").unwrap();
    let mut tailer = served.tail("").await;
    assert_eq!(tailer.next().await.unwrap().unwrap().into_data(), "twelve bytes");
    let spool = Arc::clone(&served.spool);
    let all_read = tokio::spawn(async move { spool.all_read().await });
    assert_eq!(served.call("POST", "/api/logs/read?stream=job&offset=5").await.0, 200);
    served.writer().finish().unwrap();
    assert_eq!(read_to_close(tailer, Duration::ZERO).await.0, b"");
    assert!(!all_read.is_finished(), "seven bytes are nowhere else yet");
    assert_eq!(served.call("POST", "/api/logs/read?stream=job&offset=12").await.0, 200);
    timeout(TIMEOUT, all_read).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_tail_starts_at_an_offset_or_a_time() {
    let served = SpoolServer::new("start").await;
    let writer = served.writer();
    writer.append(b"old ").unwrap();
    let stamps = served.spool.stamps();
    let since = stamps.now_ms() + 20;
    while stamps.now_ms() < since {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    writer.append(b"new").unwrap();
    writer.finish().unwrap();
    let rfc3339 = |ms: i64| jiff::Timestamp::from_millisecond(ms).unwrap().to_string();
    for (query, expected) in [
        (String::new(), "old new"),
        ("?start_time=".to_owned(), "old new"),
        ("?offset=2".to_owned(), "d new"),
        ("?offset=999".to_owned(), ""),
        (format!("?start_time={}", rfc3339(since)), "new"),
        (format!("?start_time={}", rfc3339(0)), "old new"),
        (format!("?start_time={}", rfc3339(since + 3_600_000)), ""),
    ] {
        let (got, _) = read_to_close(served.tail(&query).await, Duration::ZERO).await;
        assert_eq!(String::from_utf8(got).unwrap(), expected, "{query}");
    }
    let (status, ..) = served.call("GET", "/api/logs?stream=other").await;
    assert_eq!(status, 400);
}

#[tokio::test]
async fn reads_by_offset_report_the_end_and_wait_no_longer_than_requested() {
    let served = SpoolServer::new("offset").await;
    let (status, headers, body) = served.call("GET", "/api/logs?stream=job&offset=0&wait_ms=1").await;
    assert_eq!((status, body.len()), (200, 0));
    assert_eq!(
        (header(&headers, LOG_END_HEADER), header(&headers, LOG_COMPLETE_HEADER)),
        ("0".to_owned(), "false".to_owned())
    );
    served.writer().append(&[0, 159, 146, 150, 255, 10]).unwrap();
    let (_, headers, body) = served.call("GET", "/api/logs?stream=job&offset=1&limit=3").await;
    assert_eq!(body.as_ref(), [159, 146, 150]);
    assert_eq!(header(&headers, LOG_END_HEADER), "6");
    served.writer().finish().unwrap();
    let (_, headers, body) =
        served.call("GET", "/api/logs?stream=job&offset=18446744073709551615&wait_ms=60000").await;
    assert_eq!(body.len(), 0);
    assert_eq!(
        (header(&headers, LOG_END_HEADER), header(&headers, LOG_COMPLETE_HEADER)),
        ("6".to_owned(), "true".to_owned())
    );
}

#[tokio::test]
async fn o4_readers_in_another_process_follow_the_output_through_files_alone() {
    let served = SpoolServer::new("there").await;
    let dir = Arc::new(DirHandle::open(served.dir.path()).unwrap());
    let (watcher, ended) = (Watcher::default(), CancellationToken::new());
    let there =
        || StreamSource::there(Reader::new(Arc::clone(&dir), Stream::Job), watcher.clone(), ended.clone());
    let followers = join_all((0..20).map(|_| async {
        let (mut follow, mut hash) = (there().follow(0), Sha256::new());
        while let Some(bytes) = timeout(TIMEOUT, follow.next()).await.unwrap().unwrap() {
            hash.update(&bytes);
        }
        hex::encode(hash.finalize())
    }));
    let (half, _at_half) = oneshot::channel();
    let thread = job(served.writer(), half);
    let hashes = followers.await;
    let expected = tokio::task::spawn_blocking(|| thread.join().unwrap()).await.unwrap();
    assert!(hashes.iter().all(|hash| *hash == expected));
}

#[tokio::test]
async fn o3_the_stream_of_a_dead_writer_ends() {
    let served = SpoolServer::new("dead").await;
    served.writer().append(b"last words").unwrap();
    let dir = Arc::new(DirHandle::open(served.dir.path()).unwrap());
    let ended = CancellationToken::new();
    let source = StreamSource::there(Reader::new(dir, Stream::Job), Watcher::default(), ended.clone());
    let mut follow = source.follow(0);
    assert_eq!(follow.next().await.unwrap().unwrap(), "last words");
    let (rest, ()) = tokio::join!(timeout(TIMEOUT, follow.next()), async { ended.cancel() });
    assert_eq!(rest.unwrap().unwrap(), None);
    let answer = http::read(&source, &http::ReadQuery::default()).await;
    assert_eq!(answer.headers()[LOG_COMPLETE_HEADER], "true");
}
