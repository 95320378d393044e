//! Tests of the client against an in-process registry, with and without faults.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod test_registry;

use test_registry::{Registry, digest};
use windlass_registry::{Client, Credentials, Image, ImageName, Platform, RegistryError, Settings};

const AMD64: &str = "amd64";

async fn image(registry: &Registry, name: &str) -> Result<Image, RegistryError> {
    image_for(registry, name, AMD64, None).await
}

async fn image_for(
    registry: &Registry,
    name: &str,
    architecture: &str,
    credentials: Option<&Credentials>,
) -> Result<Image, RegistryError> {
    let name: ImageName = registry.name(name).parse().unwrap();
    Client::default().image(&name, &Platform::linux(architecture), credentials).await
}

fn somebody(password: &str) -> Credentials {
    Credentials { username: "ada".to_owned(), password: password.to_owned() }
}

#[tokio::test]
async fn an_image_is_read_by_tag_and_by_digest() {
    let registry = Registry::start().await;
    let pushed = registry.push("team/app", "1", AMD64, b"layer");
    let found = image(&registry, "team/app:1").await.unwrap();
    assert_eq!(found.digest, pushed);
    assert_eq!(found.platforms, [Platform::linux(AMD64)]);
    assert_eq!(found.config.command, ["serve"]);
    assert_eq!((found.layers.len(), found.size()), (1, 5));
    let by_digest = image(&registry, &format!("team/app@{pushed}")).await.unwrap();
    assert_eq!(by_digest, found);
}

#[tokio::test]
async fn an_index_leads_to_the_image_of_the_platform_and_says_which_there_are() {
    let registry = Registry::start().await;
    let arm = registry.push("app", "arm", "arm64", b"for arm");
    let amd = registry.push("app", "amd", AMD64, b"for amd");
    registry.push_index("app", "all", &[("arm64", &arm), (AMD64, &amd)]);
    let found = image(&registry, "app:all").await.unwrap();
    assert_eq!((found.digest, found.platforms.len()), (amd, 2));
    assert_eq!(image_for(&registry, "app:all", "arm64", None).await.unwrap().digest, arm);
    let refused = image_for(&registry, "app:all", "riscv64", None).await.unwrap_err();
    assert!(
        refused.to_string().contains("has no build for linux/riscv64, only for linux/arm64, linux/amd64")
    );
    // The same where there is no index to say so.
    let refused = image(&registry, "app:arm").await.unwrap_err();
    assert!(matches!(refused, RegistryError::NoPlatform(_)), "{refused}");
}

#[tokio::test]
async fn what_is_not_there_is_told_from_what_is_refused() {
    let registry = Registry::start().await;
    registry.push("app", "1", AMD64, b"layer");
    let missing = image(&registry, "app:2").await.unwrap_err();
    assert!(matches!(missing, RegistryError::NotFound { .. }) && missing.is_final(), "{missing}");
    registry.set_password("ada", "right");
    let refused = image(&registry, "app:1").await.unwrap_err();
    assert!(refused.to_string().contains("without a user name and password"), "{refused}");
    let refused = image_for(&registry, "app:1", AMD64, Some(&somebody("wrong"))).await.unwrap_err();
    assert!(refused.to_string().contains("with a user name and password"), "{refused}");
    assert!(image_for(&registry, "app:1", AMD64, Some(&somebody("right"))).await.is_ok());
}

#[tokio::test]
async fn a_token_is_fetched_where_one_is_asked_for_and_kept() {
    let registry = Registry::start().await;
    registry.push("team/app", "1", AMD64, b"layer");
    registry.ask_for_tokens();
    registry.set_password("ada", "right");
    let name: ImageName = registry.name("team/app:1").parse().unwrap();
    let client = Client::default();
    let credentials = somebody("right");
    for _ in 0..2 {
        client.image(&name, &Platform::linux(AMD64), Some(&credentials)).await.unwrap();
    }
    assert_eq!(registry.tokens_given(), ["repository:team/app:pull"]);
    let refused = client.image(&name, &Platform::linux(AMD64), Some(&somebody("wrong"))).await;
    // The kept token is the user's, whatever password is given now: a new client has none.
    assert!(refused.is_ok());
    assert!(image_for(&registry, "team/app:1", AMD64, Some(&somebody("wrong"))).await.is_err());
}

#[tokio::test]
async fn a_registry_that_is_out_of_order_is_asked_again() {
    let registry = Registry::start().await;
    registry.push("app", "1", AMD64, b"layer");
    registry.fail_next(2);
    assert!(image(&registry, "app:1").await.is_ok());
    registry.fail_next(3);
    let failed = image(&registry, "app:1").await.unwrap_err();
    assert!(
        !failed.is_final() && failed.to_string().contains("answered with status 503: out of order"),
        "{failed}"
    );
}

#[tokio::test]
async fn a_manifest_that_is_not_the_one_of_the_digest_is_refused() {
    let registry = Registry::start().await;
    let pushed = registry.push("app", "1", AMD64, b"layer");
    registry.replace_manifest("app", &pushed, b"{\"schemaVersion\": 2, \"layers\": []}");
    let refused = image(&registry, &format!("app@{pushed}")).await.unwrap_err();
    assert!(refused.to_string().contains("digest mismatch"), "{refused}");
}

async fn download(registry: &Registry, name: &str) -> Result<Vec<u8>, RegistryError> {
    let name: ImageName = registry.name(name).parse().unwrap();
    let client = Client::default();
    let image = client.image(&name, &Platform::linux(AMD64), None).await?;
    let mut blob = client.layer(&name, &image.layers[0], None, 0, None).await?;
    let mut bytes = Vec::new();
    while let Some(chunk) = blob.chunk().await? {
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

#[tokio::test]
async fn a_layer_comes_through_a_redirect_that_is_not_given_the_password() {
    let registry = Registry::start().await;
    registry.push("app", "1", AMD64, b"a layer");
    registry.redirect_blobs().await;
    assert_eq!(download(&registry, "app:1").await.unwrap(), b"a layer");
    assert_eq!(registry.seen_elsewhere(), ["no authorization"]);
}

#[tokio::test]
async fn a_layer_whose_connection_breaks_goes_on_where_it_stopped() {
    let registry = Registry::start().await;
    let layer: Vec<u8> = (0..100_000_u32).map(|n| n.to_le_bytes()[0]).collect();
    registry.push("app", "1", AMD64, &layer);
    registry.break_blobs(2);
    assert_eq!(download(&registry, "app:1").await.unwrap(), layer);
    assert!(registry.ranges_asked() >= 2, "{}", registry.ranges_asked());
}

#[tokio::test]
async fn a_layer_with_a_wrong_byte_is_refused_at_its_end() {
    let registry = Registry::start().await;
    registry.push("app", "1", AMD64, b"a layer");
    registry.replace_blob("app", &digest(b"a layer"), b"a later");
    let refused = download(&registry, "app:1").await.unwrap_err();
    assert!(refused.to_string().contains("layer digest mismatch"), "{refused}");
}

#[tokio::test]
async fn a_mirror_is_asked_first_and_the_registry_where_it_has_nothing() {
    let (registry, mirror) = (Registry::start().await, Registry::start().await);
    let own = registry.push("app", "1", AMD64, b"own");
    registry.push("app", "2", AMD64, b"own only");
    let copied = mirror.push("app", "1", AMD64, b"copied");
    let mirrors = [(registry.address().to_owned(), vec![mirror.address().to_owned()])].into();
    let client = Client::new(Settings { mirrors, ..Settings::default() });
    let found = async |name: &str| {
        let name: ImageName = registry.name(name).parse().unwrap();
        client.image(&name, &Platform::linux(AMD64), None).await
    };
    assert_ne!(own, copied);
    assert_eq!(found("app:1").await.unwrap().digest, copied);
    assert!(found("app:2").await.is_ok());
}

#[tokio::test]
async fn a_registry_that_nobody_reaches_is_named() {
    let name: ImageName = "127.0.0.1:1/app:1".parse().unwrap();
    let failed = Client::default().image(&name, &Platform::linux(AMD64), None).await.unwrap_err();
    assert_eq!(failed.to_string(), "failed to reach the registry 127.0.0.1:1");
    assert!(!failed.is_final());
}
