//! Users.

use windlass_api::{operations::*, server::EmptyRequest, users::*};

use crate::{app::App, auth::Caller, error::Result, http::ApiRoutes, services::users};

pub(super) fn mount(routes: ApiRoutes) -> ApiRoutes {
    routes
        .token::<ListUsers, _, _, _>(list)
        .token::<ReadMyUser, _, _, _>(mine)
        .token::<ReadUser, _, _, _>(read)
        .token::<CreateUser, _, _, _>(create)
        .token::<UpdateUser, _, _, _>(update)
        .token::<RefreshToken, _, _, _>(refresh_token)
        .token::<RefreshSshKey, _, _, _>(refresh_ssh_key)
        .token::<DeleteUsers, _, _, _>(delete)
        .token::<ListTokens, _, _, _>(named_tokens)
        .token::<CreateToken, _, _, _>(create_token)
        .token::<RevokeTokens, _, _, _>(revoke_tokens)
        .token::<ListPublicKeys, _, _, _>(public_keys)
        .token::<AddPublicKey, _, _, _>(add_public_key)
        .token::<DeletePublicKeys, _, _, _>(delete_public_keys)
}

async fn list(app: App, caller: Caller, requested: ListRequest) -> Result<UserList> {
    users::list(&app, &caller, requested).await
}

async fn mine(app: App, caller: Caller, _: EmptyRequest) -> Result<UserWithCreds> {
    users::read_self(&app, &caller).await
}

async fn read(app: App, caller: Caller, requested: NameRequest) -> Result<UserWithCreds> {
    users::read(&app, &caller, &requested.username).await
}

async fn create(app: App, caller: Caller, requested: CreateRequest) -> Result<UserWithCreds> {
    users::create(&app, &caller, requested).await
}

async fn update(app: App, caller: Caller, requested: CreateRequest) -> Result<User> {
    users::update(&app, &caller, requested).await
}

async fn refresh_token(app: App, caller: Caller, requested: NameRequest) -> Result<UserWithCreds> {
    users::refresh_token(&app, &caller, &requested.username).await
}

async fn refresh_ssh_key(app: App, caller: Caller, requested: NameRequest) -> Result<UserWithCreds> {
    users::refresh_ssh_key(&app, &caller, &requested.username).await
}

async fn delete(app: App, caller: Caller, requested: DeleteRequest) -> Result<()> {
    users::delete(&app, &caller, &requested.users).await
}

async fn named_tokens(app: App, caller: Caller, _: EmptyRequest) -> Result<Vec<NamedToken>> {
    users::named_tokens(&app, &caller).await
}

async fn create_token(app: App, caller: Caller, requested: CreateTokenRequest) -> Result<NewToken> {
    users::create_token(&app, &caller, requested).await
}

async fn revoke_tokens(app: App, caller: Caller, requested: RevokeTokensRequest) -> Result<()> {
    users::revoke_tokens(&app, &caller, &requested.names).await
}

async fn public_keys(app: App, caller: Caller, _: EmptyRequest) -> Result<Vec<PublicKey>> {
    users::public_keys(&app, &caller).await
}

async fn add_public_key(app: App, caller: Caller, requested: AddPublicKeyRequest) -> Result<PublicKey> {
    users::add_public_key(&app, &caller, requested).await
}

async fn delete_public_keys(app: App, caller: Caller, requested: DeletePublicKeysRequest) -> Result<()> {
    users::delete_public_keys(&app, &caller, requested).await
}
