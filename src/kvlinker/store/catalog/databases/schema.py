"""The tables of the catalog, in SQLite's words; ``postgresql.py`` translates the types."""

from __future__ import annotations

SCHEMA_VERSION = 11
"""The one version of the tables that is read. A change of the tables takes the next number."""

TABLES = (
    """CREATE TABLE chunks (
        key TEXT PRIMARY KEY,
        fingerprint TEXT NOT NULL,
        tenant TEXT NOT NULL,
        tokens BLOB NOT NULL,  -- little-endian uint32, as prefix
        prefix BLOB NOT NULL,
        created_at REAL NOT NULL,
        content TEXT NOT NULL,
        length INTEGER NOT NULL,  -- tokens
        nbytes INTEGER NOT NULL,  -- of KV as computed
        origin TEXT NOT NULL,  -- what its KV comes from: Chunk.origin
        text_number INTEGER  -- of its text in the tenant's search index; NULL: not there
    )""",
    "CREATE INDEX chunks_by_content ON chunks (fingerprint, tenant, content)",
    "CREATE INDEX chunks_by_tenant ON chunks (tenant, key)",
    "CREATE INDEX chunks_by_text ON chunks (tenant, text_number) WHERE text_number IS NOT NULL",
    "CREATE INDEX chunks_of_answers ON chunks (tenant) WHERE origin <> 'text'",
    "CREATE INDEX chunks_without_text ON chunks (fingerprint) WHERE text_number IS NULL",
    """CREATE TABLE context_caches (
        number INTEGER PRIMARY KEY AUTOINCREMENT,  -- the order of creation within one created_at
        id TEXT NOT NULL UNIQUE,
        tenant TEXT NOT NULL,
        model TEXT NOT NULL,
        name TEXT,
        metadata TEXT NOT NULL,  -- a JSON object of strings
        created_at REAL NOT NULL,
        expires_at REAL,
        chunk_key TEXT NOT NULL REFERENCES chunks (key),
        pinned BOOLEAN NOT NULL,
        implicit_ttl REAL  -- seconds to live from the last use; NULL: created by name
    )""",
    # another tenant's id is as far from a match in this index as an unknown one
    "CREATE INDEX context_caches_by_owner ON context_caches (tenant, id)",
    "CREATE INDEX context_caches_by_tenant ON context_caches (tenant, created_at, number)",
    "CREATE INDEX context_caches_by_chunk ON context_caches (chunk_key)",
    "CREATE INDEX context_caches_by_expiry ON context_caches (expires_at)"
    " WHERE expires_at IS NOT NULL",
    "CREATE INDEX context_caches_pinned ON context_caches (chunk_key) WHERE pinned",
    "CREATE INDEX context_caches_implicit ON context_caches (tenant, (expires_at - implicit_ttl))"
    " WHERE implicit_ttl IS NOT NULL",
    """CREATE TABLE metadata (
        tenant TEXT NOT NULL,
        key TEXT NOT NULL,
        value TEXT NOT NULL,
        created_at REAL NOT NULL,
        number INTEGER NOT NULL REFERENCES context_caches (number) ON DELETE CASCADE,
        PRIMARY KEY (tenant, key, value, created_at, number)
    ) WITHOUT ROWID""",
    "CREATE INDEX metadata_by_number ON metadata (number)",
    """CREATE TABLE variants (
        key TEXT PRIMARY KEY,
        fingerprint TEXT NOT NULL,
        tenant TEXT NOT NULL,
        content TEXT NOT NULL,
        prefix BLOB NOT NULL,  -- little-endian uint32
        contextualization TEXT NOT NULL,  -- JSON
        reuse REAL NOT NULL  -- Cache-Craft's f_r
    )""",
    "CREATE INDEX variants_by_content ON variants (fingerprint, tenant, content)",
    "CREATE INDEX variants_by_reuse ON variants (reuse)",
    """CREATE TABLE tenants (
        name TEXT PRIMARY KEY,
        caches INTEGER NOT NULL DEFAULT 0,
        chunks INTEGER NOT NULL DEFAULT 0,
        tokens INTEGER NOT NULL DEFAULT 0,  -- of its chunks, as nbytes
        nbytes INTEGER NOT NULL DEFAULT 0
    ) WITHOUT ROWID""",
    # one row where token ids are encrypted: it opens with the key
    "CREATE TABLE encryption (sealed BLOB NOT NULL)",
    # chunks that were removed here, until it is certain that no tier holds them any more
    "CREATE TABLE released (key TEXT PRIMARY KEY, released_at REAL NOT NULL) WITHOUT ROWID",
    # where listings go on whose last item was removed
    """CREATE TABLE removed_positions (
        tenant TEXT NOT NULL,
        id TEXT NOT NULL,
        created_at REAL NOT NULL,
        number INTEGER NOT NULL,
        removed_at INTEGER NOT NULL,  -- Unix seconds
        PRIMARY KEY (tenant, id)
    ) WITHOUT ROWID""",
    "CREATE INDEX removed_positions_by_time ON removed_positions (removed_at)",
    # in SQLite, the texts of the tenant's chunks are in the FTS5 table texts_<number>
    "CREATE TABLE search_indexes (number INTEGER PRIMARY KEY, tenant TEXT NOT NULL UNIQUE)",
    # what the texts of chunks mean to an embedding model
    """CREATE TABLE vectors (
        tenant TEXT NOT NULL,
        embedder TEXT NOT NULL,  -- the model's fingerprint
        key TEXT NOT NULL REFERENCES chunks (key) ON DELETE CASCADE,
        vector BLOB NOT NULL,  -- little-endian float32
        PRIMARY KEY (tenant, embedder, key)
    )""",
    "CREATE INDEX vectors_by_chunk ON vectors (key, embedder)",
    # answers of the Responses API, each with its input, for requests that go on from them
    """CREATE TABLE responses (
        key TEXT PRIMARY KEY,  -- random
        tenant TEXT NOT NULL,
        id TEXT NOT NULL,
        previous TEXT,  -- the key of the response that it goes on from
        created_at REAL NOT NULL,
        expires_at REAL NOT NULL,
        nbytes INTEGER NOT NULL,  -- of its texts, as they are kept
        body BLOB NOT NULL,  -- compressed JSON, as input: the response without its output
        input BLOB NOT NULL  -- its request's own items
    )""",
    "CREATE UNIQUE INDEX responses_by_owner ON responses (tenant, id)",
    "CREATE INDEX responses_by_use ON responses (tenant, expires_at, nbytes)",
    "CREATE INDEX responses_by_expiry ON responses (expires_at)",
    """CREATE TABLE response_items (
        key TEXT PRIMARY KEY,  -- random
        response TEXT NOT NULL REFERENCES responses (key) ON DELETE CASCADE,
        position INTEGER NOT NULL,
        tenant TEXT NOT NULL,
        id TEXT NOT NULL,
        content BLOB NOT NULL  -- compressed JSON
    )""",
    "CREATE INDEX response_items_by_response ON response_items (response, position)",
    "CREATE INDEX response_items_by_owner ON response_items (tenant, id)",
    # what audits found: samples, and what those up to a number came to
    """CREATE TABLE audit_samples (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        fingerprint TEXT NOT NULL,
        server TEXT NOT NULL,
        content TEXT NOT NULL  -- JSON, as state
    )""",
    "CREATE INDEX audit_samples_by_model ON audit_samples (fingerprint, number)",
    """CREATE TABLE audit_states (
        fingerprint TEXT PRIMARY KEY,
        pool TEXT NOT NULL,
        upto INTEGER NOT NULL,
        state TEXT
    ) WITHOUT ROWID""",
)

ACCOUNTS = {
    "context_cache_added": (
        "context_caches",
        "INSERT",
        "INSERT INTO tenants (name, caches) VALUES (NEW.tenant, 1)"
        " ON CONFLICT (name) DO UPDATE SET caches = tenants.caches + 1",
    ),
    "context_cache_removed": (
        "context_caches",
        "DELETE",
        "UPDATE tenants SET caches = caches - 1 WHERE name = OLD.tenant",
    ),
    "context_cache_position": (
        "context_caches",
        "DELETE",
        "INSERT INTO removed_positions VALUES"
        " (OLD.tenant, OLD.id, OLD.created_at, OLD.number, unixepoch())",
    ),
    "chunk_added": (
        "chunks",
        "INSERT",
        "INSERT INTO tenants (name, chunks, tokens, nbytes)"
        " VALUES (NEW.tenant, 1, NEW.length, NEW.nbytes)"
        " ON CONFLICT (name) DO UPDATE SET chunks = tenants.chunks + 1,"
        " tokens = tenants.tokens + NEW.length, nbytes = tenants.nbytes + NEW.nbytes",
    ),
    "chunk_removed": (
        "chunks",
        "DELETE",
        "UPDATE tenants SET chunks = chunks - 1, tokens = tokens - OLD.length,"
        " nbytes = nbytes - OLD.nbytes WHERE name = OLD.tenant",
    ),
}
"""Triggers, which keep the accounts of tenants and where listings go on: by name, the table, the
event, and the statement for each row."""
