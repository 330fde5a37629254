#!/bin/bash
# ruleid: KH-CONFIG-CHROMA-OPEN
chroma run --path d --host 0.0.0.0
# ok: KH-CONFIG-CHROMA-OPEN
chroma run --path d
# ruleid: KH-CONFIG-MILVUS-OPEN
milvus run standalone
# ok: KH-CONFIG-MILVUS-OPEN
COMMON_SECURITY_AUTHORIZATIONENABLED=true milvus run standalone
# ruleid: KH-CONFIG-QDRANT-OPEN
docker run -e QDRANT__SERVICE__API_KEY= qdrant/qdrant
# ruleid: KH-CONFIG-QDRANT-OPEN
docker run --rm -p 6333:6333 qdrant/qdrant:v1.15
# ruleid: KH-CONFIG-QDRANT-OPEN
./qdrant
# ok: KH-CONFIG-QDRANT-OPEN
docker run --volume=./q:/qdrant/config qdrant/qdrant
# ok: KH-CONFIG-QDRANT-OPEN
./qdrant --config-path qdrant.yaml
# ok: KH-CONFIG-QDRANT-OPEN
docker run -p 127.0.0.1:6333:6333 qdrant/qdrant
# ok: KH-CONFIG-QDRANT-OPEN
docker run -e QDRANT__SERVICE__API_KEY qdrant/qdrant
# ok: KH-CONFIG-QDRANT-OPEN
qdrant is a store of vectors
# ok: KH-CONFIG-QDRANT-OPEN
docker exec qdrant ls; echo qdrant; docker pull qdrant/qdrant
# ok: KH-CONFIG-WEAVIATE-OPEN
weaviate --host 127.0.0.1 --port 8080
# ok: KH-CONFIG-WEAVIATE-OPEN
AUTHENTICATION_APIKEY_ENABLED=true weaviate --host 0.0.0.0
# ruleid: KH-CONFIG-QDRANT-OPEN
docker run -p 6333:6333 -e A=b qdrant/qdrant
# ok: KH-CONFIG-QDRANT-OPEN
docker pull qdrant/qdrant
# ruleid: KH-CONFIG-WEAVIATE-OPEN
docker run -p 8080:8080 -e AUTHENTICATION_ANONYMOUS_ACCESS_ENABLED=true cr.weaviate.io/semitechnologies/weaviate:1.30
# ok: KH-CONFIG-WEAVIATE-OPEN
docker run -p 127.0.0.1:8080:8080 -e AUTHENTICATION_ANONYMOUS_ACCESS_ENABLED=true cr.weaviate.io/semitechnologies/weaviate:1.30
# ruleid: KH-CONFIG-CHROMA-RESET
export ALLOW_RESET=TRUE
# ok: KH-CONFIG-CHROMA-RESET
export ALLOW_RESET=FALSE
# a key that is set before
export QDRANT__SERVICE__API_KEY="$KEY"
# ok: KH-CONFIG-QDRANT-OPEN
exec ./qdrant
