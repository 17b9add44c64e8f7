# From protos/psfleet/v1/agent.proto, SHA-256 009daa8ee2eda46bd1fc977984d5f783d33002d52a4cb45fb4258b285b584cc8
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AgentMember(_message.Message):
    __slots__ = ("role", "rank", "stage", "copy")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    role: str
    rank: int
    stage: int
    copy: int
    def __init__(self, role: _Optional[str] = ..., rank: _Optional[int] = ..., stage: _Optional[int] = ..., copy: _Optional[int] = ...) -> None: ...

class AgentMessage(_message.Message):
    __slots__ = ("hello", "opened", "ready", "exited", "alive", "ending", "notice", "output", "swept", "ping", "leaving", "connected", "job_file")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    EXITED_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SWEPT_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    JOB_FILE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    opened: Opened
    ready: Ready
    exited: Exited
    alive: AgentMember
    ending: AgentMember
    notice: Notice
    output: OutputChunk
    swept: Swept
    ping: Ping
    leaving: str
    connected: Connected
    job_file: JobFile
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., opened: _Optional[_Union[Opened, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., exited: _Optional[_Union[Exited, _Mapping]] = ..., alive: _Optional[_Union[AgentMember, _Mapping]] = ..., ending: _Optional[_Union[AgentMember, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ..., output: _Optional[_Union[OutputChunk, _Mapping]] = ..., swept: _Optional[_Union[Swept, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., leaving: _Optional[str] = ..., connected: _Optional[_Union[Connected, _Mapping]] = ..., job_file: _Optional[_Union[JobFile, _Mapping]] = ...) -> None: ...

class LauncherMessage(_message.Message):
    __slots__ = ("refused", "open", "spawn", "signal", "command", "expect", "sweep", "ping", "relocations", "probe", "connect", "die", "job_file")
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    SPAWN_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    EXPECT_FIELD_NUMBER: _ClassVar[int]
    SWEEP_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    RELOCATIONS_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    CONNECT_FIELD_NUMBER: _ClassVar[int]
    DIE_FIELD_NUMBER: _ClassVar[int]
    JOB_FILE_FIELD_NUMBER: _ClassVar[int]
    refused: str
    open: OpenJob
    spawn: Spawn
    signal: Signal
    command: ServerCommand
    expect: AgentMember
    sweep: bool
    ping: Ping
    relocations: Relocations
    probe: bool
    connect: Connect
    die: bool
    job_file: JobFile
    def __init__(self, refused: _Optional[str] = ..., open: _Optional[_Union[OpenJob, _Mapping]] = ..., spawn: _Optional[_Union[Spawn, _Mapping]] = ..., signal: _Optional[_Union[Signal, _Mapping]] = ..., command: _Optional[_Union[ServerCommand, _Mapping]] = ..., expect: _Optional[_Union[AgentMember, _Mapping]] = ..., sweep: bool = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., relocations: _Optional[_Union[Relocations, _Mapping]] = ..., probe: bool = ..., connect: _Optional[_Union[Connect, _Mapping]] = ..., die: bool = ..., job_file: _Optional[_Union[JobFile, _Mapping]] = ...) -> None: ...

class JobFile(_message.Message):
    __slots__ = ("name", "content")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    content: bytes
    def __init__(self, name: _Optional[str] = ..., content: _Optional[bytes] = ...) -> None: ...

class Relocations(_message.Message):
    __slots__ = ("moved",)
    class MovedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MOVED_FIELD_NUMBER: _ClassVar[int]
    moved: _containers.ScalarMap[str, str]
    def __init__(self, moved: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "psfleet", "python", "name", "address", "cores", "memory", "gpus", "pid")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PSFLEET_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    psfleet: str
    python: str
    name: str
    address: str
    cores: int
    memory: int
    gpus: _containers.RepeatedScalarFieldContainer[str]
    pid: int
    def __init__(self, protocol: _Optional[int] = ..., psfleet: _Optional[str] = ..., python: _Optional[str] = ..., name: _Optional[str] = ..., address: _Optional[str] = ..., cores: _Optional[int] = ..., memory: _Optional[int] = ..., gpus: _Optional[_Iterable[str]] = ..., pid: _Optional[int] = ...) -> None: ...

class OpenJob(_message.Message):
    __slots__ = ("request", "name", "token", "working_folder", "logs", "variables", "credentials", "workers", "probe")
    class VariablesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class CredentialsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    WORKING_FOLDER_FIELD_NUMBER: _ClassVar[int]
    LOGS_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    request: bytes
    name: str
    token: str
    working_folder: str
    logs: str
    variables: _containers.ScalarMap[str, str]
    credentials: _containers.ScalarMap[str, bytes]
    workers: int
    probe: str
    def __init__(self, request: _Optional[bytes] = ..., name: _Optional[str] = ..., token: _Optional[str] = ..., working_folder: _Optional[str] = ..., logs: _Optional[str] = ..., variables: _Optional[_Mapping[str, str]] = ..., credentials: _Optional[_Mapping[str, bytes]] = ..., workers: _Optional[int] = ..., probe: _Optional[str] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("error", "has_shared_logs")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    HAS_SHARED_LOGS_FIELD_NUMBER: _ClassVar[int]
    error: str
    has_shared_logs: bool
    def __init__(self, error: _Optional[str] = ..., has_shared_logs: bool = ...) -> None: ...

class Spawn(_message.Message):
    __slots__ = ("member", "endpoints", "resume", "follows", "takes_commands", "listen")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    TAKES_COMMANDS_FIELD_NUMBER: _ClassVar[int]
    LISTEN_FIELD_NUMBER: _ClassVar[int]
    member: AgentMember
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    resume: str
    follows: bool
    takes_commands: bool
    listen: str
    def __init__(self, member: _Optional[_Union[AgentMember, _Mapping]] = ..., endpoints: _Optional[_Iterable[str]] = ..., resume: _Optional[str] = ..., follows: bool = ..., takes_commands: bool = ..., listen: _Optional[str] = ...) -> None: ...

class Signal(_message.Message):
    __slots__ = ("member", "number")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    member: AgentMember
    number: int
    def __init__(self, member: _Optional[_Union[AgentMember, _Mapping]] = ..., number: _Optional[int] = ...) -> None: ...

class ServerCommand(_message.Message):
    __slots__ = ("member", "line")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    member: AgentMember
    line: str
    def __init__(self, member: _Optional[_Union[AgentMember, _Mapping]] = ..., line: _Optional[str] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("member", "endpoint")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    member: AgentMember
    endpoint: str
    def __init__(self, member: _Optional[_Union[AgentMember, _Mapping]] = ..., endpoint: _Optional[str] = ...) -> None: ...

class Connect(_message.Message):
    __slots__ = ("endpoint",)
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    def __init__(self, endpoint: _Optional[str] = ...) -> None: ...

class Connected(_message.Message):
    __slots__ = ("endpoint", "error")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    error: str
    def __init__(self, endpoint: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class Exited(_message.Message):
    __slots__ = ("member", "code", "left", "cause", "cpu_seconds", "peak_memory")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    CPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_FIELD_NUMBER: _ClassVar[int]
    member: AgentMember
    code: int
    left: bool
    cause: str
    cpu_seconds: float
    peak_memory: int
    def __init__(self, member: _Optional[_Union[AgentMember, _Mapping]] = ..., code: _Optional[int] = ..., left: bool = ..., cause: _Optional[str] = ..., cpu_seconds: _Optional[float] = ..., peak_memory: _Optional[int] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("member", "text")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    member: AgentMember
    text: str
    def __init__(self, member: _Optional[_Union[AgentMember, _Mapping]] = ..., text: _Optional[str] = ...) -> None: ...

class OutputChunk(_message.Message):
    __slots__ = ("member", "data", "is_error")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    IS_ERROR_FIELD_NUMBER: _ClassVar[int]
    member: AgentMember
    data: bytes
    is_error: bool
    def __init__(self, member: _Optional[_Union[AgentMember, _Mapping]] = ..., data: _Optional[bytes] = ..., is_error: bool = ...) -> None: ...

class Swept(_message.Message):
    __slots__ = ("joined", "left_behind")
    JOINED_FIELD_NUMBER: _ClassVar[int]
    LEFT_BEHIND_FIELD_NUMBER: _ClassVar[int]
    joined: bool
    left_behind: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, joined: bool = ..., left_behind: _Optional[_Iterable[str]] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("sent_at",)
    SENT_AT_FIELD_NUMBER: _ClassVar[int]
    sent_at: float
    def __init__(self, sent_at: _Optional[float] = ...) -> None: ...
