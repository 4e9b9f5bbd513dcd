"""Addresses of object storage: which driver, which server, whose credentials, how many retries.

What is understood, and what it takes from the environment:

    s3://bucket/path    AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL: another server than AWS (MinIO,
                        Ceph, …). AWS_REGION or AWS_DEFAULT_REGION; without them AWS is asked
                        where the bucket is. AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and
                        AWS_SESSION_TOKEN), else AWS_PROFILE, else what the machine has.
                        AWS_NO_SIGN_REQUEST=1: no credentials, for public buckets.
    gs://bucket/path    GOOGLE_APPLICATION_CREDENTIALS, or what the machine has.
    http://, https://   read only.
    STILLROOM_STORAGE   a JSON object of TensorStore's context resources, for all of them. It
                        changes what is decided here, and passes on what is not, such as
                        {"s3_request_retries": {"max_retries": 20}} or
                        {"gcs_user_project": {"project_id": "pays"}}.

Secrets stay in the environment: no address, message or pickle of ours holds any.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

import tensorstore as ts

from cache.errors import CacheError

SETTINGS = "STILLROOM_STORAGE"

# A dead host is given up after 23 s, a busy one after nine attempts.
_RETRIES = {"max_retries": 8, "initial_delay": "250ms", "max_delay": "5s"}
# Seconds to wait for a connection, and for a connection on which nothing comes. TensorStore
# takes them from the environment of the process, when it first connects.
_WAITING = {
    "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": "5",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "20",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}
# The server of a custom endpoint that no region was given for.
_ANY_REGION = "us-east-1"
# What TensorStore adds to an error: the response's body, with ids of keys and signatures.
_DETAILS = re.compile(r" \[(?:http_response|x-amz|x-goog|curl_code|source location)")
_STATUS = re.compile(r"http_response_code='([0-9]+)'")

_CREDENTIALS = (
    "The credentials are missing or not accepted: check AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; AWS_NO_SIGN_REQUEST=1 reads a public bucket without."
)
# What to do next, by what an error says; the first that fits.
_ADVICE = (
    (
        "NoSuchBucket",
        "There is no such bucket on {server}: make it, or check the address and the endpoint.",
    ),
    (
        "InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|InvalidToken|TokenRefreshRequired"
        "|Failed to get credentials|UNAUTHENTICATED|Unknown, HTTP status 40[013]",
        _CREDENTIALS,
    ),
    (
        "PermanentRedirect|TemporaryRedirect|AuthorizationHeaderMalformed|IllegalLocation"
        "|HTTP status 301",
        "The bucket is in another region than {region}: set AWS_REGION to the bucket's.",
    ),
    (
        "AccessDenied|PERMISSION_DENIED",
        "Get permission for that place, or give other credentials (AWS_PROFILE, AWS_ACCESS_KEY_ID "
        "and AWS_SECRET_ACCESS_KEY; for gs:// GOOGLE_APPLICATION_CREDENTIALS).",
    ),
    (
        "SlowDown|TooManyRequests|HTTP (?:code|status) (?:429|503)",
        f"{{server}} is too busy. Run the same command again later, or with fewer workers: what "
        f"is stored stays. {SETTINGS} sets how often it is tried.",
    ),
    (
        "CURL error|DEADLINE_EXCEEDED|UNAVAILABLE|retry attempts failed",
        "{server} does not answer: check the address, the endpoint and the connection, then run "
        "the same command again: what is stored stays.",
    ),
)


def is_remote(location: str) -> bool:
    """Whether a location is an address, and not a local path.

    Raises:
      CacheError: it looks like an address and is none, or holds a password or a query.
    """
    scheme = re.match(r"([a-z][a-z0-9+]*):(?:/|$)", location)
    if scheme is None or not location.startswith(f"{scheme[1]}://"):
        if scheme is not None and scheme[1] in ("s3", "gs", "http", "https"):
            raise CacheError(
                f"{location} is neither a path nor an address: write {scheme[1]}://bucket/path."
            )
        return False
    rest = location.removeprefix(f"{scheme[1]}://")
    if scheme[1] != "file" and "@" in rest.split("/")[0]:
        raise CacheError(
            f"an {scheme[1]}:// address should hold no user name or password: messages show it. "
            "Give credentials in the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE, …)."
        )
    if scheme[1] in ("http", "https") and re.search(r"[?#]", rest):
        raise CacheError(
            f"the {scheme[1]}:// address should end with the cache's folder: names of objects are "
            "added to it. It has a '?' or '#'."
        )
    return True


def specification(location: str, folder: str = "") -> dict[str, Any] | str:
    """TensorStore's key-value specification of an address, or of a folder below it.

    Args:
      location: an address, without "/" at its end.
      folder: "" or a folder with "/" at its end.

    Raises:
      CacheError: an s3:// or gs:// address without a bucket.
    """
    scheme, rest = location.split("://", 1)
    if scheme not in ("s3", "gs"):
        return f"{location}/{folder}"
    bucket, _, path = rest.partition("/")
    if not bucket:
        raise CacheError(f"{location} names no bucket: write {scheme}://bucket/path.")
    place = {"bucket": bucket, "path": f"{path}/{folder}" if path else folder}
    if scheme == "gs":
        return {"driver": "gcs", **place}
    endpoint, region = _endpoint(), _region()
    return {
        "driver": "s3",
        **place,
        **({"endpoint": endpoint} if endpoint else {}),
        **({"aws_region": region} if region else {}),
    }


def resources() -> dict[str, Any]:
    """TensorStore's context resources for object storage: retries, credentials, the user's own.

    Raises:
      CacheError: STILLROOM_STORAGE is not what it should be.
    """
    for name, value in _WAITING.items():
        os.environ.setdefault(name, value)
    found: dict[str, Any] = {
        f"{driver}_request_retries": _RETRIES for driver in ("s3", "gcs", "http")
    }
    credentials = _credentials()
    if credentials:
        found["aws_credentials"] = credentials
    for name, value in _settings().items():
        both = isinstance(value, dict) and isinstance(found.get(name), dict)
        found[name] = {**found[name], **value} if both else value
    return found


def explain(location: str, reason: str) -> tuple[str, str]:
    """What TensorStore said of an address, without the response's body; and what to do next."""
    text, status = _DETAILS.split(reason)[0], _STATUS.search(reason)
    if status and text.endswith("Unknown"):
        # What asks only whether an object is there gets no more than a status.
        text = f"{text}, HTTP status {status[1]}"
    endpoint = re.sub("//[^/]*@", "//", _endpoint())
    server = "the server" if not location.startswith("s3://") else endpoint or "AWS"
    region = _region() or "the one that was asked"
    for pattern, advice in _ADVICE:
        if re.search(pattern, text):
            said = advice.format(server=server, region=region)
            return text, re.sub("^the ", "The ", said)
    return text, "Check the place and the connection, then run the same command again."


def _endpoint() -> str:
    given = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    return given.rstrip("/")


def _region() -> str:
    given = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return given or (_ANY_REGION if _endpoint() else "")


def _credentials() -> dict[str, Any]:
    """Where s3:// takes credentials from; nothing: TensorStore's own chain of places."""
    if os.environ.get("AWS_NO_SIGN_REQUEST", "").lower() in ("1", "true", "yes"):
        return {"type": "anonymous"}
    if os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY"):
        # The chain looks into files as well, and complains on standard error without any.
        return {"type": "environment"}
    profile = os.environ.get("AWS_PROFILE")
    return {"type": "profile", "profile": profile} if profile else {}


def _settings() -> dict[str, Any]:
    text = os.environ.get(SETTINGS, "").strip()
    if not text:
        return {}
    try:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError("it is not an object")
        ts.Context.Spec(value)
    except ValueError as error:
        raise CacheError(
            f"the environment variable {SETTINGS} should be a JSON object of TensorStore's context "
            f'resources, such as {{"s3_request_retries": {{"max_retries": 20}}}}: {error}'
        ) from error
    return value
