//! Streaming bodies: large, endless, and in both directions at once.

use bytes::Bytes;
use futures_util::{SinkExt as _, StreamExt as _};
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::{
    Request, Response,
    body::{Body as _, Frame},
    client::conn::http2,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    sync::mpsc,
};
use tokio_tungstenite::tungstenite::Message;

use crate::support::{
    TestProxy, TestResponse, Upstream, read_head, read_until, service, text_response, wait_until,
    with_timeout,
};

#[tokio::test]
async fn server_sent_events_are_forwarded_one_by_one() {
    let (send, receive) = mpsc::channel::<&'static str>(1);
    let receive = std::sync::Arc::new(parking_lot::Mutex::new(Some(receive)));
    let upstream = Upstream::http(move |_| {
        let mut receive = receive.lock().take().unwrap();
        async move {
            let events = futures_util::stream::poll_fn(move |cx| receive.poll_recv(cx))
                .map(|event| Ok(Frame::data(Bytes::from(event))));
            let mut response = Response::new(http_body_util::BodyExt::boxed(StreamBody::new(events)));
            response.headers_mut().insert("content-type", "text/event-stream".parse().unwrap());
            response
        }
    })
    .await;
    let bed = TestProxy::new(vec![service(vec![upstream.replica("a")])]).await;
    let mut stream = bed.connect().await;
    stream.write_all(b"GET /events HTTP/1.1\r\nHost: llm.test\r\n\r\n").await.unwrap();
    let head = read_head(&mut stream).await.to_ascii_lowercase();
    assert!(head.contains("text/event-stream") && head.contains("transfer-encoding: chunked"), "{head}");
    for event in ["data: one\n\n", "data: two\n\n"] {
        // The next event is not sent before this one has arrived.
        send.send(event).await.unwrap();
        read_until(&mut stream, &format!("{event}\r\n")).await;
    }
    drop(send);
    read_until(&mut stream, "0\r\n\r\n").await;
}

#[tokio::test]
async fn an_event_stream_of_a_service_ends_when_its_token_is_revoked() {
    let (send, receive) = mpsc::channel::<&'static str>(1);
    let receive = std::sync::Arc::new(parking_lot::Mutex::new(Some(receive)));
    let upstream = Upstream::http(move |_| {
        let mut receive = receive.lock().take().unwrap();
        async move {
            let events = futures_util::stream::poll_fn(move |cx| receive.poll_recv(cx))
                .map(|event| Ok(Frame::data(Bytes::from(event))));
            Response::new(http_body_util::BodyExt::boxed(StreamBody::new(events)))
        }
    })
    .await;
    let mut closed = service(vec![upstream.replica("a")]);
    closed.auth = true;
    let bed = TestProxy::new(vec![closed]).await;
    let mut stream = bed.connect().await;
    let head = b"GET /events HTTP/1.1\r\nHost: llm.test\r\nAuthorization: Bearer good\r\n\r\n";
    stream.write_all(head).await.unwrap();
    read_head(&mut stream).await;
    send.send("data: one\n\n").await.unwrap();
    read_until(&mut stream, "data: one\n\n\r\n").await;
    bed.revoked.cancel();
    // The replica continues; the caller receives nothing more, not even a regular end.
    let mut rest = Vec::new();
    let _ = with_timeout(stream.read_to_end(&mut rest)).await;
    assert!(!String::from_utf8_lossy(&rest).contains("0\r\n\r\n"), "{rest:?}");
    with_timeout(send.closed()).await;
}

#[tokio::test]
async fn a_websocket_of_a_service_ends_when_its_token_is_revoked() {
    let upstream = Upstream::raw(|stream| async move {
        let mut socket = tokio_tungstenite::accept_async(stream).await.unwrap();
        while let Some(Ok(message)) = socket.next().await {
            if socket.send(message).await.is_err() {
                break;
            }
        }
    })
    .await;
    let mut closed = service(vec![upstream.replica("a")]);
    closed.auth = true;
    let bed = TestProxy::new(vec![closed]).await;
    let request =
        tokio_tungstenite::tungstenite::ClientRequestBuilder::new("ws://llm.test/socket".parse().unwrap())
            .with_header("Authorization", "Bearer good");
    let (mut socket, _) = tokio_tungstenite::client_async(request, bed.connect().await).await.unwrap();
    socket.send(Message::text("hello")).await.unwrap();
    assert_eq!(with_timeout(socket.next()).await.unwrap().unwrap(), Message::text("hello"));
    bed.revoked.cancel();
    assert!(!matches!(with_timeout(socket.next()).await, Some(Ok(_))), "the connection is gone");
}

#[tokio::test]
async fn large_bodies_pass_unchanged_in_both_directions() {
    let upstream = Upstream::http(|request| async move {
        let sent = request.into_body();
        let exact = sent.size_hint().exact();
        let body = sent.collect().await.unwrap().to_bytes();
        assert!(exact.is_none_or(|length| length == body.len() as u64));
        text_response(body)
    })
    .await;
    let bed = TestProxy::new(vec![service(vec![upstream.replica("a")])]).await;
    let body: Vec<u8> = (0..8_u32 << 20).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let hash = crc32fast::hash(&body);
    for chunked in [false, true] {
        let (mut read, mut write) = bed.connect().await.into_split();
        let body = body.clone();
        let writer = crate::support::AbortOnDrop(tokio::spawn(async move {
            let framing = if chunked {
                "Transfer-Encoding: chunked".to_owned()
            } else {
                format!("Content-Length: {}", body.len())
            };
            let head = format!("PUT / HTTP/1.1\r\nHost: llm.test\r\nConnection: close\r\n{framing}\r\n\r\n");
            write.write_all(head.as_bytes()).await.unwrap();
            for piece in body.chunks(100_000) {
                if chunked {
                    write.write_all(format!("{:x}\r\n", piece.len()).as_bytes()).await.unwrap();
                }
                write.write_all(piece).await.unwrap();
                if chunked {
                    write.write_all(b"\r\n").await.unwrap();
                }
            }
            if chunked {
                write.write_all(b"0\r\n\r\n").await.unwrap();
            }
            std::future::pending::<()>().await;
        }));
        let mut answer = Vec::new();
        with_timeout(read.read_to_end(&mut answer)).await.unwrap();
        drop(writer);
        let head = answer.windows(4).position(|four| four == b"\r\n\r\n").unwrap() + 4;
        assert_eq!(crc32fast::hash(&answer[head..]), hash, "chunked: {chunked}");
    }
}

#[tokio::test]
async fn a_slow_replica_applies_backpressure_to_the_client() {
    let upstream = Upstream::raw(|mut stream| async move {
        read_head(&mut stream).await;
        std::future::pending::<()>().await;
    })
    .await;
    let bed = TestProxy::new(vec![service(vec![upstream.replica("a")])]).await;
    let mut stream = bed.connect().await;
    let head = "POST / HTTP/1.1\r\nHost: llm.test\r\nContent-Length: 1000000000\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    let piece = vec![0; 64 * 1024];
    let mut taken = 0_usize;
    // The buffers of two connections fill; then nothing more is accepted.
    while let Ok(Ok(n)) =
        tokio::time::timeout(std::time::Duration::from_millis(500), stream.write(&piece)).await
    {
        taken += n;
        assert!(taken < 64 << 20, "the proxy gathers what the replica does not take");
    }
}

#[tokio::test]
async fn trailers_pass_in_both_directions() {
    let upstream = Upstream::raw(|mut stream| async move {
        let head = read_head(&mut stream).await;
        assert!(head.contains("te: trailers") && head.contains("trailer: X-Sum"), "{head}");
        let body = read_until(&mut stream, "\r\n\r\n").await;
        assert_eq!(body, "2\r\nhi\r\n0\r\nx-sum: 7\r\n\r\n");
        let says = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-End, Content-Length\r\n\r\n\
                    3\r\nyes\r\n0\r\nX-End: 9\r\nContent-Length: 5\r\n\r\n";
        stream.write_all(says.as_bytes()).await.unwrap();
    })
    .await;
    let bed = TestProxy::new(vec![service(vec![upstream.replica("a")])]).await;
    let request = "POST / HTTP/1.1\r\nHost: llm.test\r\nConnection: close, te\r\nTE: trailers\r\nTrailer: X-Sum\r\n\
                   Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nX-Sum: 7\r\nHost: evil\r\n\r\n";
    let answer = bed.raw(request).await.to_ascii_lowercase();
    assert!(answer.ends_with("3\r\nyes\r\n0\r\nx-end: 9\r\n\r\n"), "{answer}");
}

#[tokio::test]
async fn a_client_that_expects_100_continue_receives_it() {
    let upstream = Upstream::echo().await;
    let bed = TestProxy::new(vec![service(vec![upstream.replica("a")])]).await;
    let mut stream = bed.connect().await;
    let head = "POST / HTTP/1.1\r\nHost: llm.test\r\nConnection: close\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    assert_eq!(read_head(&mut stream).await, "HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(b"hello").await.unwrap();
    let mut answer = String::new();
    with_timeout(stream.read_to_string(&mut answer)).await.unwrap();
    let got = TestResponse::parse(&answer);
    assert!(got.status == 200 && got.body.ends_with("\n\nhello") && !got.body.contains("expect"), "{answer}");
}

#[tokio::test]
async fn a_response_may_arrive_before_the_request_ends() {
    let upstream = Upstream::raw(|mut stream| async move {
        read_head(&mut stream).await;
        let says = "HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno";
        stream.write_all(says.as_bytes()).await.unwrap();
    })
    .await;
    let bed = TestProxy::new(vec![service(vec![upstream.replica("a")])]).await;
    let mut stream = bed.connect().await;
    let head = "POST / HTTP/1.1\r\nHost: llm.test\r\nContent-Length: 100000000\r\n\r\nfirst";
    stream.write_all(head.as_bytes()).await.unwrap();
    assert!(read_until(&mut stream, "no").await.starts_with("HTTP/1.1 413"));
}

#[tokio::test]
async fn a_request_body_above_the_services_limit_gets_413() {
    let upstream = Upstream::echo().await;
    let mut small = service(vec![upstream.replica("a")]);
    small.body_max = Some(4);
    let bed = TestProxy::new(vec![small]).await;
    assert_eq!(bed.request("POST", "/", &[], "1234").await.status, 200);
    assert_eq!(bed.request("POST", "/", &[], "12345").await.status, 413);
    let request = "POST / HTTP/1.1\r\nHost: llm.test\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n\
                   3\r\nabc\r\n3\r\ndef\r\n0\r\n\r\n";
    assert_eq!(TestResponse::parse(&bed.raw(request).await).status, 413);
}

#[tokio::test]
async fn a_websocket_is_proxied_and_counts_as_in_flight_until_it_ends() {
    let upstream = Upstream::raw(|stream| async move {
        let mut socket = tokio_tungstenite::accept_async(stream).await.unwrap();
        socket.send(Message::text("welcome")).await.unwrap();
        while let Some(Ok(message)) = socket.next().await {
            if message.is_text() {
                socket.send(message).await.unwrap();
            }
        }
    })
    .await;
    let bed = TestProxy::new(vec![service(vec![upstream.replica("a")])]).await;
    let stream = bed.connect().await;
    let (mut socket, response) =
        tokio_tungstenite::client_async("ws://llm.test/socket", stream).await.unwrap();
    assert_eq!(response.status(), 101);
    assert_eq!(with_timeout(socket.next()).await.unwrap().unwrap(), Message::text("welcome"));
    let live = bed.routes.service("main/llm").unwrap();
    for n in 0..100 {
        socket.send(Message::text(n.to_string())).await.unwrap();
        assert_eq!(with_timeout(socket.next()).await.unwrap().unwrap(), Message::text(n.to_string()));
    }
    assert_eq!((live.stats().read().in_flight, live.replicas()[0].outstanding()), (1, 1));
    drop(socket);
    wait_until("it is over", || live.stats().read().in_flight == 0).await;
    wait_until("the replica is free", || live.replicas()[0].outstanding() == 0).await;
}

#[tokio::test]
async fn http2_requests_from_clients_are_proxied() {
    let upstream = Upstream::echo().await;
    let bed = TestProxy::new(vec![service(vec![upstream.replica("a")])]).await;
    let stream = TokioIo::new(bed.connect().await);
    let (sender, connection) = http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    let _connection = crate::support::AbortOnDrop(tokio::spawn(async move { connection.await.unwrap() }));
    let send_request = |n: usize| {
        let mut sender = sender.clone();
        async move {
            let request = Request::post(format!("http://llm.test/{n}"))
                .header("cookie", "a=1")
                .header("cookie", "b=2")
                .body(Full::new(Bytes::from("x".repeat(n * 1000))))
                .unwrap();
            let response = sender.send_request(request).await.unwrap();
            assert_eq!(response.status(), 200);
            let body = response.into_body().collect().await.unwrap().to_bytes();
            String::from_utf8(body.to_vec()).unwrap()
        }
    };
    let bodies = with_timeout(futures_util::future::join_all((0..40).map(send_request))).await;
    for (n, body) in bodies.iter().enumerate() {
        assert!(body.starts_with(&format!("POST /{n}\nhost: llm.test\n")), "{body}");
        assert!(body.contains("cookie: a=1; b=2\n"), "{body}");
        assert!(body.ends_with(&format!("\n{}", "x".repeat(n * 1000))));
    }
}
