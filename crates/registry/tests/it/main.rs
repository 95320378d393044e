//! Tests of the client against an in-process registry, with and without faults.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod test_registry;

use test_registry::{Registry, digest};
use windlass_dial::AllowedAddresses;
use windlass_registry::{
    Client, Credentials, Image, ImageName, LayerHosts, Platform, RegistryError, Settings,
};

const AMD64: &str = "amd64";

async fn resolve(registry: &Registry, name: &str) -> Result<Image, RegistryError> {
    resolve_for(registry, name, AMD64, None).await
}

async fn resolve_for(
    registry: &Registry,
    name: &str,
    architecture: &str,
    credentials: Option<&Credentials>,
) -> Result<Image, RegistryError> {
    let name: ImageName = registry.name(name).parse().unwrap();
    Client::default().resolve_image(&name, &Platform::linux(architecture), credentials).await
}

fn demo_credentials(password: &str) -> Credentials {
    Credentials { username: "ada".to_owned(), password: password.to_owned() }
}

#[tokio::test]
async fn an_image_is_resolved_by_tag_and_by_digest() {
    let registry = Registry::start().await;
    let pushed = registry.push("team/app", "1", AMD64, b"layer");
    let found = resolve(&registry, "team/app:1").await.unwrap();
    assert_eq!(found.digest, pushed);
    assert_eq!(found.platforms, [Platform::linux(AMD64)]);
    assert_eq!(found.config.command, ["serve"]);
    assert_eq!((found.layers.len(), found.size()), (1, 5));
    let by_digest = resolve(&registry, &format!("team/app@{pushed}")).await.unwrap();
    assert_eq!(by_digest, found);
}

#[tokio::test]
async fn an_index_is_resolved_by_platform_and_the_error_lists_existing_platforms() {
    let registry = Registry::start().await;
    let arm = registry.push("app", "arm", "arm64", b"for arm");
    let amd = registry.push("app", "amd", AMD64, b"for amd");
    registry.push_index("app", "all", &[("arm64", &arm), (AMD64, &amd)]);
    let found = resolve(&registry, "app:all").await.unwrap();
    assert_eq!((found.digest, found.platforms.len()), (amd, 2));
    assert_eq!(resolve_for(&registry, "app:all", "arm64", None).await.unwrap().digest, arm);
    let refused = resolve_for(&registry, "app:all", "riscv64", None).await.unwrap_err();
    assert!(
        refused.to_string().contains("has no build for linux/riscv64, only for linux/arm64, linux/amd64")
    );
    // The same without an index.
    let refused = resolve(&registry, "app:arm").await.unwrap_err();
    assert!(matches!(refused, RegistryError::NoPlatform(_)), "{refused}");
}

#[tokio::test]
async fn missing_images_and_refused_credentials_are_different_errors() {
    let registry = Registry::start().await;
    registry.push("app", "1", AMD64, b"layer");
    let missing = resolve(&registry, "app:2").await.unwrap_err();
    assert!(matches!(missing, RegistryError::NotFound { .. }) && missing.is_final(), "{missing}");
    registry.set_password("ada", "right");
    let refused = resolve(&registry, "app:1").await.unwrap_err();
    assert!(refused.to_string().contains("without a user name and password"), "{refused}");
    let refused = resolve_for(&registry, "app:1", AMD64, Some(&demo_credentials("wrong"))).await.unwrap_err();
    assert!(refused.to_string().contains("with a user name and password"), "{refused}");
    assert!(resolve_for(&registry, "app:1", AMD64, Some(&demo_credentials("right"))).await.is_ok());
}

#[tokio::test]
async fn a_registry_token_is_fetched_when_required_and_cached() {
    let registry = Registry::start().await;
    registry.push("team/app", "1", AMD64, b"layer");
    registry.require_tokens();
    registry.set_password("ada", "right");
    let name: ImageName = registry.name("team/app:1").parse().unwrap();
    let client = Client::default();
    let credentials = demo_credentials("right");
    for _ in 0..2 {
        client.resolve_image(&name, &Platform::linux(AMD64), Some(&credentials)).await.unwrap();
    }
    assert_eq!(registry.issued_scopes(), ["repository:team/app:pull"]);
    let refused =
        client.resolve_image(&name, &Platform::linux(AMD64), Some(&demo_credentials("wrong"))).await;
    // The cached token is not used for callers who do not know the password.
    assert!(matches!(refused, Err(RegistryError::Denied { .. })), "{refused:?}");
}

#[tokio::test]
async fn restricted_addresses_are_contacted_only_if_their_registry_is_listed() {
    let registry = Registry::start().await;
    registry.push("app", "1", AMD64, b"layer");
    let name: ImageName = registry.name("app:1").parse().unwrap();
    let allowed_addresses = AllowedAddresses::External { but: vec![] };
    let client = |plain_http: Vec<String>| {
        Client::new(Settings {
            plain_http,
            allowed_addresses: allowed_addresses.clone(),
            ..Settings::default()
        })
    };
    let platform = Platform::linux(AMD64);
    let refused = client(vec![]).resolve_image(&name, &platform, None).await.unwrap_err();
    assert!(!refused.is_final() && matches!(refused, RegistryError::Unreachable { .. }), "{refused}");
    let listed = client(vec![name.registry().to_owned()]);
    assert!(listed.resolve_image(&name, &platform, None).await.is_ok());
}

#[tokio::test]
async fn an_image_is_described_for_the_first_platform_that_it_has() {
    let registry = Registry::start().await;
    let arm = registry.push("app", "arm", "arm64", b"for arm");
    let name: ImageName = registry.name("app:arm").parse().unwrap();
    let wanted = [Platform::linux(AMD64), Platform::linux("arm64")];
    let found = Client::default().describe_image(&name, &wanted, None).await.unwrap();
    assert_eq!((found.digest, found.platforms), (arm, vec![Platform::linux("arm64")]));
    let wanted = [Platform::linux(AMD64), Platform::linux("riscv64")];
    let missing = Client::default().describe_image(&name, &wanted, None).await.unwrap_err().to_string();
    assert!(missing.contains("no build for linux/amd64, linux/riscv64, only for linux/arm64"), "{missing}");
}

#[tokio::test]
async fn a_registry_error_is_retried_and_finally_reported() {
    let registry = Registry::start().await;
    registry.push("app", "1", AMD64, b"layer");
    registry.fail_next(2);
    assert!(resolve(&registry, "app:1").await.is_ok());
    registry.fail_next(3);
    let failed = resolve(&registry, "app:1").await.unwrap_err();
    assert!(
        !failed.is_final() && failed.to_string().contains("answered with status 503: out of order"),
        "{failed}"
    );
}

#[tokio::test]
async fn a_manifest_that_does_not_match_its_digest_is_rejected() {
    let registry = Registry::start().await;
    let pushed = registry.push("app", "1", AMD64, b"layer");
    registry.replace_manifest("app", &pushed, b"{\"schemaVersion\": 2, \"layers\": []}");
    let refused = resolve(&registry, &format!("app@{pushed}")).await.unwrap_err();
    assert!(refused.to_string().contains("digest mismatch"), "{refused}");
}

async fn download(registry: &Registry, name: &str) -> Result<Vec<u8>, RegistryError> {
    let name: ImageName = registry.name(name).parse().unwrap();
    download_with(&Client::default(), &name, LayerHosts::MirrorsFirst).await
}

async fn download_with(
    client: &Client,
    name: &ImageName,
    hosts: LayerHosts,
) -> Result<Vec<u8>, RegistryError> {
    let image = client.resolve_image(name, &Platform::linux(AMD64), None).await?;
    let mut blob = client.download_layer(name, &image.layers[0], None, hosts, (0, None)).await?;
    let mut bytes = Vec::new();
    while let Some(chunk) = blob.next_chunk().await? {
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

#[tokio::test]
async fn a_redirected_layer_download_does_not_send_credentials() {
    let registry = Registry::start().await;
    registry.push("app", "1", AMD64, b"a layer");
    registry.redirect_blobs().await;
    assert_eq!(download(&registry, "app:1").await.unwrap(), b"a layer");
    assert_eq!(registry.redirected_requests(), ["no authorization"]);
}

#[tokio::test]
async fn a_redirect_to_an_address_that_is_not_allowed_is_not_followed() {
    let registry = Registry::start().await;
    registry.push("app", "1", AMD64, b"a layer");
    registry.redirect_blobs().await;
    let name: ImageName = registry.name("app:1").parse().unwrap();
    let client = Client::new(Settings {
        plain_http: vec![name.registry().to_owned()],
        allowed_addresses: AllowedAddresses::Public { but: vec![] },
        ..Settings::default()
    });
    let image = client.resolve_image(&name, &Platform::linux(AMD64), None).await.unwrap();
    let first = client.download_layer(&name, &image.layers[0], None, LayerHosts::Registry, (0, None)).await;
    let Err(refused) = first else {
        panic!("followed");
    };
    assert!(matches!(refused, RegistryError::Unreachable { .. }), "{refused}");
    assert!(registry.redirected_requests().is_empty());
}

#[tokio::test]
async fn an_interrupted_layer_download_resumes_where_it_stopped() {
    let registry = Registry::start().await;
    let layer: Vec<u8> = (0..100_000_u32).map(|n| n.to_le_bytes()[0]).collect();
    registry.push("app", "1", AMD64, &layer);
    registry.break_blobs(2);
    assert_eq!(download(&registry, "app:1").await.unwrap(), layer);
    assert!(registry.range_requests() >= 2, "{}", registry.range_requests());
}

#[tokio::test]
async fn a_layer_that_does_not_match_its_digest_is_rejected() {
    let registry = Registry::start().await;
    registry.push("app", "1", AMD64, b"a layer");
    registry.replace_blob("app", &digest(b"a layer"), b"a later");
    let refused = download(&registry, "app:1").await.unwrap_err();
    assert!(refused.to_string().contains("layer digest mismatch"), "{refused}");
}

#[tokio::test]
async fn an_image_is_resolved_at_the_mirror_first_and_then_at_the_registry() {
    let (registry, mirror) = (Registry::start().await, Registry::start().await);
    let own = registry.push("app", "1", AMD64, b"own");
    registry.push("app", "2", AMD64, b"own only");
    let copied = mirror.push("app", "1", AMD64, b"copied");
    let mirrors = [(registry.address().to_owned(), vec![mirror.address().to_owned()])].into();
    let client = Client::new(Settings { mirrors, ..Settings::default() });
    let found = async |name: &str| {
        let name: ImageName = registry.name(name).parse().unwrap();
        client.resolve_image(&name, &Platform::linux(AMD64), None).await
    };
    assert_ne!(own, copied);
    assert_eq!(found("app:1").await.unwrap().digest, copied);
    assert!(found("app:2").await.is_ok());
}

#[tokio::test]
async fn a_mirror_that_breaks_or_corrupts_a_layer_is_left_for_the_registry() {
    let (registry, mirror) = (Registry::start().await, Registry::start().await);
    let layer: Vec<u8> = (0..100_000_u32).map(|n| n.to_le_bytes()[0]).collect();
    registry.push("app", "1", AMD64, &layer);
    mirror.push("app", "1", AMD64, &layer);
    let mirrors = [(registry.address().to_owned(), vec![mirror.address().to_owned()])].into();
    let client = Client::new(Settings { mirrors, ..Settings::default() });
    let name: ImageName = registry.name("app:1").parse().unwrap();
    assert!(client.has_mirrors(&name));
    // More often than one host is tried: the registry sends the rest.
    mirror.break_blobs(100);
    assert_eq!(download_with(&client, &name, LayerHosts::MirrorsFirst).await.unwrap(), layer);
    assert!(registry.range_requests() >= 1);
    mirror.break_blobs(0);
    let mut changed = layer.clone();
    changed[5] ^= 1;
    mirror.replace_blob("app", &digest(&layer), &changed);
    let refused = download_with(&client, &name, LayerHosts::MirrorsFirst).await.unwrap_err();
    assert!(refused.to_string().contains("layer digest mismatch"), "{refused}");
    assert_eq!(download_with(&client, &name, LayerHosts::Registry).await.unwrap(), layer);
}

#[tokio::test]
async fn the_error_names_an_unreachable_registry() {
    let name: ImageName = "127.0.0.1:1/app:1".parse().unwrap();
    let failed = Client::default().resolve_image(&name, &Platform::linux(AMD64), None).await.unwrap_err();
    assert_eq!(failed.to_string(), "failed to reach the registry 127.0.0.1:1");
    assert!(!failed.is_final());
}
