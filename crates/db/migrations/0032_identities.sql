-- Users as an identity provider knows them. A login finds the user by `subject`, which the provider never gives to another person.
CREATE TABLE identities (
    issuer TEXT NOT NULL,
    subject TEXT NOT NULL,
    user_id TEXT NOT NULL REFERENCES users (id),
    -- Sessions of the identity are bound to this token. Its text is not kept anywhere.
    token_id TEXT NOT NULL REFERENCES tokens (id),
    created_at BIGINT NOT NULL,
    last_login_at BIGINT NOT NULL,
    PRIMARY KEY (issuer, subject)
);
CREATE INDEX identities_user ON identities (user_id);

-- Members that joined a project by a group of the identity provider, and leave it with the group.
CREATE TABLE group_members (
    project_id TEXT NOT NULL REFERENCES projects (id),
    user_id TEXT NOT NULL REFERENCES users (id),
    PRIMARY KEY (project_id, user_id)
);
CREATE INDEX group_members_user ON group_members (user_id);
