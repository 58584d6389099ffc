"""Holds the pages for people and the files that they load, none of which needs a build step.

`index.html` shows the cluster and offers a chat, or a comparison of texts for models that compute vectors. It reads
/health, /recent and /v1/models. `docs.html` shows /openapi.json with Swagger UI, whose version NOTICE names. The two
files of Swagger UI are stored compressed (`gzip -9n`), without their reference to a source map.
"""
